"""Time csimclr_loss against simclr_loss, forward and backward.

    python benchmarks/objective.py --device cuda

Prints one JSON line. It also has the memory of the largest batch beyond its inputs, and the times
with streamed and with stored logits.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import captured, environment, race

from compressive import info_nce
from compressive.objectives import csimclr_loss, simclr_loss

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "simclr": lambda x, y: simclr_loss(x, y).loss,
    "csimclr": lambda x, y: csimclr_loss(x, y).loss,
    "csimclr, closed rate": lambda x, y: csimclr_loss(x, y, residual_estimator="analytic").loss,
}


def step(loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Callable:
    """Return a function that runs forward and backward to the projections."""
    return lambda: torch.autograd.grad(loss(x, y), (x, y))


def streamed(function: Callable) -> Callable:
    """Return the same function without stored logits."""

    def run() -> object:
        keep, info_nce._KEEP = info_nce._KEEP, 0
        result = function()
        info_nce._KEEP = keep
        return result

    return run


def projections(batch: int, dim: int, device: str) -> list[torch.Tensor]:
    """Return projections of two views that agree as in a trained network."""
    x, noise = torch.randn(2, batch, dim, device=device)
    return [x.requires_grad_(), (x.detach() + noise).requires_grad_()]


def peak_gib(batch: int, dim: int) -> float:
    """Return the memory in GiB of one csimclr_loss and its backward beyond the inputs (CUDA)."""
    x, y = projections(batch, dim, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    csimclr_loss(x, y).loss.backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=256)
    arguments = parser.parse_args()
    device = arguments.device
    torch.manual_seed(0)
    x, y = projections(arguments.batch, arguments.dim, device)
    functions: dict[str, Callable[[], object]] = {}
    for name, loss in LOSSES.items():
        functions[name] = step(loss, x, y)
        if device == "cuda":
            functions[f"{name}, graph"] = captured(step(loss, x, y))
            functions[f"{name}, compiled"] = step(torch.compile(loss, fullgraph=True), x, y)
    functions["simclr, streamed"] = streamed(step(LOSSES["simclr"], x, y))
    times = race(functions, device, arguments.rounds)
    ratios = {
        f"csimclr{kind} / simclr{kind}": times[f"csimclr{kind}"] / times[f"simclr{kind}"]
        for kind in ("", ", graph", ", compiled")
        if f"csimclr{kind}" in times
    }
    ratios["streamed / kept"] = times["simclr, streamed"] / times["simclr"]
    report: dict[str, object] = {
        "benchmark": "objective: forward + backward",
        "batch": arguments.batch,
        "dim": arguments.dim,
        "dtype": "float32",
        "milliseconds": {k: round(v, 3) for k, v in times.items()},
        "ratio": {k: round(v, 3) for k, v in ratios.items()},
    }
    if device == "cuda":
        report["GiB beyond the inputs"] = {b: round(peak_gib(b, 256), 3) for b in (4096, 16384)}
    print(json.dumps(report | environment(device)))


if __name__ == "__main__":
    main()
