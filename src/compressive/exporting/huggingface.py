"""Export to the Hugging Face layout: timm's two files, preprocessing and a model card."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import timm.data
import torch
from PIL import Image
from torch import Tensor

from compressive.augment.ops import central_share
from compressive.encoder import Encoder
from compressive.exporting import timm_format
from compressive.exporting.model import ExportModel
from compressive.exporting.parity import largest_difference

_PROCESSOR_FILE = "preprocessor_config.json"
_TO = "huggingface"


def check(model: ExportModel) -> None:
    """Raise CannotRepresent if timm cannot build the network."""
    timm_format.find_timm_model(model, to=_TO)


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Write timm's files and the settings of the image processor; the model card comes later."""
    timm_format.write_folder(model, path, timm_format.find_timm_model(model, half=half, to=_TO))
    config = json.loads((path / timm_format.TIMM_CONFIG).read_text("utf-8"))
    processor = {
        "image_processor_type": "TimmWrapperImageProcessor",
        "architecture": config["architecture"],
        "pretrained_cfg": config["pretrained_cfg"],
        "compressive": _own_preprocessing(model.encoder),
    }
    (path / _PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", "utf-8")


def _own_preprocessing(encoder: Encoder) -> dict[str, Any]:
    """Describe `Encoder.preprocess`, which timm's transform may only approximate."""
    colors = {"mean": list(encoder.mean), "std": list(encoder.std)}
    if encoder.crop is not None:
        return {"size": encoder.size, **encoder.crop._asdict(), **colors}
    return {
        "size": encoder.size,
        "shrink_longer_side_to": encoder.side,
        "central_share": central_share(encoder.size),
        "antialias": encoder.antialias,
        **colors,
    }


@torch.inference_mode()
def outputs(
    model: ExportModel, path: Path, batches: Sequence[Tensor]
) -> Mapping[str, list[Tensor]]:
    """Return what the exported network computes in timm and in transformers."""
    # By name, because its lazy modules cost the type checker ten seconds.
    transformers: Any = import_module("transformers")
    found = dict(timm_format.outputs(model, path, batches))
    with _quiet():
        kind = "AutoModelForImageClassification" if model.head else "AutoModel"
        network = getattr(transformers, kind).from_pretrained(path).eval()
        results = [network(pixel_values=inputs) for inputs in batches]
    found["transformers"] = [r.logits if model.head else r.pooler_output for r in results]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bar and the warnings of transformers."""
    logging: Any = import_module("transformers.utils.logging")
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    kind = "AutoModelForImageClassification" if model.head else "AutoModel"
    return f'{timm_format.usage(model, path)}, or transformers.{kind}.from_pretrained("{path}")'


def preprocessing_difference(model: ExportModel, path: Path, images: list[Tensor]) -> float:
    """Return how much outputs change if timm's transform replaces `Encoder.preprocess`."""
    config = json.loads((path / timm_format.TIMM_CONFIG).read_text("utf-8"))["pretrained_cfg"]
    transform: Any = timm.data.create_transform(**timm.data.resolve_data_config(config))
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    theirs = torch.stack([transform(picture) for picture in pictures])
    ours = model.encoder.preprocess(images)
    return largest_difference(model.outputs(ours), model.outputs(theirs))
