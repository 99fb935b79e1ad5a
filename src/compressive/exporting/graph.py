"""The module whose graph `onnx` and `torch-export` store."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compressive.exporting.model import ExportModel
from compressive.exporting.preprocessing import GraphPreprocessing
from compressive.rundir.tensors_file import to_float16

INPUT, FEATURES, LOGITS = "images", "features", "logits"


def make_graph(model: ExportModel, *, with_preprocessing: bool, half: bool) -> nn.Module:
    """Return a module from images to features, or to logits if there is a classifier."""
    parts: list[nn.Module] = [copy.deepcopy(model.encoder.network)]
    if model.head is not None:
        parts.append(copy.deepcopy(model.head))
    network: nn.Module = nn.Sequential(*parts).to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    network = _HalfWeights(network) if half else network
    if with_preprocessing:
        network = nn.Sequential(GraphPreprocessing(model.encoder), network)
    return network.eval().requires_grad_(False)


def example_input(model: ExportModel, *, with_preprocessing: bool) -> Tensor:
    """Return two images of a shape that the graph accepts."""
    size = model.encoder.size
    if with_preprocessing:
        return torch.zeros(2, 3, size + 3, size + 5, dtype=torch.uint8)
    return torch.zeros(2, 3, size, size)


def dynamic_axes(*, with_preprocessing: bool) -> dict[int, torch.export.Dim]:
    """Return the axes of the input that may have any length."""
    Dim = torch.export.Dim
    axes = {0: Dim("batch", min=1)}
    if with_preprocessing:
        axes |= {2: Dim("height", min=1), 3: Dim("width", min=1)}
    return axes


class _HalfWeights(nn.Module):
    """A network whose kernels are stored as float16 and used as float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for name, value in (*network.named_parameters(), *network.named_buffers()):
            value.data = to_float16(value.data, name)

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's output."""
        stored = dict(self.network.state_dict(keep_vars=True))
        full = {k: v.float() if v.dtype == torch.float16 else v for k, v in stored.items()}
        return functional_call(self.network, full, (images,))
