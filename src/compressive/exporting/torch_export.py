"""Export with torch.export: one file with graph and weights, which torch alone loads."""

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressive.exporting import graph
from compressive.exporting.model import ExportModel

# Run in a process in which neither this package nor timm can be imported.
_LOAD = """
import sys
sys.modules["compressive"] = sys.modules["timm"] = None
import torch
from safetensors.torch import load_file, save_file
program, inputs, found = sys.argv[1:]
module = torch.export.load(program).module()
with torch.inference_mode():
    batches = load_file(inputs)
    save_file({name: module(images).contiguous() for name, images in batches.items()}, found)
"""


def check(model: ExportModel) -> None:
    """Accept every network."""


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Trace the network and write the program."""
    network = graph.make_graph(model, with_preprocessing=with_preprocessing, half=half)
    example = graph.example_input(model, with_preprocessing=with_preprocessing)
    axes = graph.dynamic_axes(with_preprocessing=with_preprocessing)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about torch's own code
        program = torch.export.export(network, (example,), dynamic_shapes=(axes,))
        torch.export.save(program, path)


def outputs(
    model: ExportModel, path: Path, batches: Sequence[Tensor]
) -> Mapping[str, list[Tensor]]:
    """Return what the program computes in a process without this package."""
    with tempfile.TemporaryDirectory() as folder:
        images, found = Path(folder, "images"), Path(folder, "found")
        save_file({str(i): batch.contiguous() for i, batch in enumerate(batches)}, images)
        command = [sys.executable, "-c", _LOAD, str(path), str(images), str(found)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"the exported program does not run without this package: {reason}")
        outputs = load_file(found)
        return {"torch": [outputs[str(i)] for i in range(len(batches))]}


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    return f'torch.export.load("{path}").module()'
