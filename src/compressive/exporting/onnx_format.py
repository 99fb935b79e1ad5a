"""Export to ONNX: one file with graph and weights."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressive.exporting import graph
from compressive.exporting.formats import CannotRepresent
from compressive.exporting.model import ExportModel

OPSET = 23  # the newest that the converter of torch 2.11 supports
_MOST_BYTES = 2**31 - 2**20  # limit of a protobuf file, with a margin for the graph


def check(model: ExportModel) -> None:
    """Raise CannotRepresent if the weights do not fit in one file."""
    size = sum(value.numel() * value.element_size() for value in model.encoder.parameters())
    if size > _MOST_BYTES:
        raise CannotRepresent("onnx", f"its weights have {size / 1e9:.1f} GB, above ONNX's 2 GB")


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Trace the network and write the file."""
    network = graph.make_graph(model, with_preprocessing=with_preprocessing, half=half)
    example = graph.example_input(model, with_preprocessing=with_preprocessing)
    axes = graph.dynamic_axes(with_preprocessing=with_preprocessing)
    with _without_messages():
        program = torch.onnx.export(
            network,
            (example,),
            dynamo=True,
            input_names=[graph.INPUT],
            output_names=[graph.LOGITS if model.head else graph.FEATURES],
            dynamic_shapes=(axes,),
            opset_version=OPSET,
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(_metadata(model))
        program.save(str(path), external_data=False)


@contextlib.contextmanager
def _without_messages() -> Any:
    """Drop messages of the converter, which are about its own code."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _metadata(model: ExportModel) -> dict[str, str]:
    """Return what a user of the file needs to know, as JSON."""
    encoder = model.encoder
    known = {"input_size": encoder.size, "mean": encoder.mean, "std": encoder.std}
    known |= {"classes": model.classes} if model.classes else {}
    return {name: json.dumps(value) for name, value in known.items()}


def outputs(
    model: ExportModel, path: Path, batches: Sequence[Tensor]
) -> Mapping[str, list[Tensor]]:
    """Return what onnxruntime computes on the CPU."""
    import onnx
    import onnxruntime

    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    arrays = [inputs.contiguous().numpy() for inputs in batches]
    found = [session.run(None, {graph.INPUT: array})[0] for array in arrays]
    return {"onnxruntime": [torch.from_numpy(outputs) for outputs in found]}


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    return f'onnxruntime.InferenceSession("{path}").run(None, {{"{graph.INPUT}": array}})[0]'
