"""Compare a compiled step with recomputation to a plain one, without shape checks."""

import sys
from typing import Any

import torch
from compiled_methods import tiny
from torch import Tensor, nn

from compressive.train.step import checkpoint_activations


def encoder() -> nn.Module:
    """Return three convolutions with norms and activations between them."""
    parts: list[nn.Module] = []
    for wide, width in ((3, 32), (32, 32), (32, 96)):
        convolution = nn.Conv2d(wide, width, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def results(device: str, backend: str, *, is_recomputed: bool) -> tuple[list[Tensor], int]:
    """Return gradients and statistics after a step, and the bytes saved for backward."""
    torch.manual_seed(0)
    method: Any = tiny("simclr")
    method.encoder = encoder()
    method.double().to(device)
    step = method
    if is_recomputed:
        checkpoint_activations(method.encoder)
        step = torch.compile(method, fullgraph=True, backend=backend)
    x, y = torch.randn(2, 8, 3, 12, 12, dtype=torch.float64).to(device)
    kept: list[int] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each.numel() * each.element_size())
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        torch.manual_seed(2)
        loss = step((x, y), torch.ones((), dtype=torch.float64, device=device)).loss
    loss.backward()
    return [*(p.grad for p in method.parameters()), *method.buffers()], sum(kept)


def main(device: str, backend: str) -> None:
    """Print the largest relative difference and the fraction of saved bytes."""
    whole, all_bytes = results(device, backend, is_recomputed=False)
    again, some_bytes = results(device, backend, is_recomputed=True)
    pairs = [(a.double(), b.double()) for a, b in zip(again, whole, strict=True)]
    print(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    print(some_bytes / all_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
