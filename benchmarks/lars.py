"""Time one LARS step on ResNet-50 with its heads, against a loop over the tensors."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment, race

from compressive.optim import LARS

TRUST, MOMENTUM, DECAY, LR = 0.001, 0.9, 1e-6, 4.8  # C-SimCLR, 300 epochs, batch 4096


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50, a projection head 2048-4096-256 and a linear classifier."""
    convs: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    wide = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            if block == 0:
                convs.append((4 * width, wide, 1, 1))
            convs += [(width, wide, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            wide = 4 * width
    norms = [(conv[0],) for conv in convs for _ in ("gamma", "beta")]
    heads = [(4096, 2048), (4096,), (4096,), (256, 4096), (1000, 2048), (1000,)]
    return [*convs, *norms, *heads]


def make_parameters(device: str) -> list[Tensor]:
    """Return random weights with random gradients, convolutions in channels_last."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes():
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        values = torch.randn(2, *shape, device=device, generator=generator)
        p = values[0].contiguous(memory_format=layout).requires_grad_()
        p.grad = values[1].contiguous(memory_format=layout)
        params.append(p)
    return params


@torch.no_grad()
def loop_step(params: list[Tensor], momenta: list[Tensor]) -> None:
    """Apply a simple LARS step, tensor by tensor, without synchronizing with the device."""
    for p, v in zip(params, momenta, strict=True):
        assert p.grad is not None
        if p.ndim <= 1:
            v.mul_(MOMENTUM).add_(p.grad, alpha=LR)
        else:
            update = p.grad.add(p, alpha=DECAY)
            w, g = p.norm(), update.norm()
            ratio = torch.where((w > 0) & (g > 0), TRUST * w / g, 1.0)
            v.mul_(MOMENTUM).add_(update.mul_(LR * ratio))
        p.sub_(v)


def kernels(step: Callable[[], object], device: str) -> int | None:
    """Return the number of kernels and copies that one step launches on the GPU."""
    if device != "cuda":
        return None
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as trace:  # torch 2.11 warns without acc_events
        step()
        torch.cuda.synchronize()
    on_device = [event.name for event in trace.events() or [] if "CUDA" in str(event.device_type)]
    return sum(not name.startswith("Optimizer.") for name in on_device)


def main() -> None:
    """Time both implementations and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    params, ours = make_parameters(args.device), make_parameters(args.device)
    momenta = [torch.zeros_like(p) for p in params]
    weights = [p for p in ours if p.ndim > 1]
    rest = [p for p in ours if p.ndim <= 1]
    groups = [{"params": weights}, {"params": rest, "adapt": False}]
    optimizer = LARS(groups, LR, momentum=MOMENTUM, weight_decay=DECAY, trust_coefficient=TRUST)

    def loop() -> None:
        loop_step(params, momenta)

    loop()
    optimizer.step()
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, params, strict=True))
    times = race({"ours": optimizer.step, "loop": loop}, args.device, args.steps)
    line = {
        "benchmark": "lars: one step",
        "tensors": len(params),
        "parameters": sum(p.numel() for p in params),
        "milliseconds": {name: round(time, 3) for name, time in times.items()},
        "ratio": {"loop / ours": round(times["loop"] / times["ours"], 2)},
        "kernels": {
            "ours": kernels(optimizer.step, args.device),
            "loop": kernels(loop, args.device),
        },
        "relative_difference": apart,
        **environment(args.device),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
