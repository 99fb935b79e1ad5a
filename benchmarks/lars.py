"""Time one LARS step on ResNet-50 with its heads, against a loop over the tensors."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from compressive.optim import LARS

TRUST, MOMENTUM, DECAY, LR = 0.001, 0.9, 1e-6, 4.8  # C-SimCLR, 300 epochs, batch 4096


def shapes() -> list[tuple[int, ...]]:
    """ResNet-50, a projection head 2048-4096-256 and a linear classifier, as torch shapes them."""
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
    """Random weights with random gradients, convolutions in channels_last."""
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
    """LARS as one would write it first: tensor by tensor, though without waiting for the device."""
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


def median_us(step: Callable[[], object], steps: int, device: str) -> float:
    """Wall time of one step in microseconds, from an idle device to an idle device."""
    seconds = []
    for _ in range(steps + 3):  # three to warm up
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds[3:])


def kernels(step: Callable[[], object], device: str) -> int | None:
    """Kernels and copies that one step puts on the GPU."""
    if device != "cuda":
        return None
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as trace:  # without it torch 2.11 warns
        step()
        torch.cuda.synchronize()
    on_device = [event.name for event in trace.events() or [] if "CUDA" in str(event.device_type)]
    return sum(not name.startswith("Optimizer.") for name in on_device)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    params, ours = make_parameters(args.device), make_parameters(args.device)
    momenta = [torch.zeros_like(p) for p in params]
    weights = [p for p in ours if p.ndim > 1]
    rest = [p for p in ours if p.ndim <= 1]
    groups = [{"params": weights}, {"params": rest, "adapt": False}]
    optimizer = LARS(groups, LR, momentum=MOMENTUM, weight_decay=DECAY, trust=TRUST)

    def loop() -> None:
        loop_step(params, momenta)

    loop()
    optimizer.step()
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, params, strict=True))
    loop_us = median_us(loop, args.steps, args.device)
    ours_us = median_us(optimizer.step, args.steps, args.device)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    line = {
        "benchmark": "lars",
        "tensors": len(params),
        "parameters": sum(p.numel() for p in params),
        "ours_us": round(ours_us, 1),
        "loop_us": round(loop_us, 1),
        "speedup": round(loop_us / ours_us, 2),
        "ours_kernels": kernels(optimizer.step, args.device),
        "loop_kernels": kernels(loop, args.device),
        "relative_difference": apart,
        "steps": args.steps,
        "device": args.device,
        "hardware": hardware or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
