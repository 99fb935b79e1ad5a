"""Time variants of the compiled ResNet-50 against today's bare compiled network.

    python benchmarks/network.py                # all variants; about four minutes on an H200
    python benchmarks/network.py graph stem     # some of them
    python benchmarks/network.py --profile      # today's network, time per kind of kernel

Prints one JSON line: milliseconds per forward and backward pass over 512 views of 224 pixels in
bfloat16, peak memory, and how much the gradients differ from those of today's network. `noise` is
the difference between two runs of today's network. Contestants are timed in turn.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment, race

from compressive import networks


class FoldedStem(nn.Module):
    """The 7x7 convolution of stride 2 as a 4x4 convolution of stride 1 over 2x2 blocks of pixels.

    It computes the same sums. Its input has 12 channels instead of 3, which suits tensor cores.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight = conv.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of images that `fold` has changed."""
        out, channels = self.weight.shape[:2]
        wide = F.pad(self.weight, (1, 0, 1, 0)).reshape(out, channels, 4, 2, 4, 2)
        kernel = wide.permute(0, 1, 3, 5, 2, 4).reshape(out, 4 * channels, 4, 4)
        return F.conv2d(F.pad(x, (2, 1, 2, 1)), kernel)


def fold(x: Tensor) -> Tensor:
    """Return images with each 2x2 block of pixels as channels."""
    return F.pixel_unshuffle(x, 2).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Variant:
    """What a contestant changes compared with today's network."""

    mode: str = "default"
    options: dict[str, Any] = field(default_factory=dict)  # of torch._inductor.config
    memory_budget: float = 1.0
    cudnn_benchmark: bool = False
    folded_stem: bool = False


VARIANTS = {
    "network": Variant(),
    "again": Variant(),  # shows the noise of times and of gradients
    "graph": Variant(mode="reduce-overhead"),
    "cudnn": Variant(cudnn_benchmark=True),
    "stem": Variant(folded_stem=True),
    "tuned": Variant(options={"coordinate_descent_tuning": True}),
    "products": Variant(
        options={
            "conv_1x1_as_mm": True,
            "max_autotune_gemm": True,
            "max_autotune_gemm_backends": "TRITON,ATEN",
        }
    ),
    "recompute": Variant(memory_budget=0.5),
    "all": Variant(
        cudnn_benchmark=True, folded_stem=True, options={"coordinate_descent_tuning": True}
    ),
}


class Contestant:
    """One compiled network with its input."""

    def __init__(
        self,
        variant: Variant,
        views: int,
        size: int,
        device: torch.device,
        name: str = "resnet50",
    ) -> None:
        torch.manual_seed(0)
        name, _, small = name.partition("-")
        stem: networks.Stem = "cifar" if small == "cifar" else "imagenet"
        network: Any = networks.backbone(name, stem=stem).to(device)
        x = torch.randn(views, 3, size, size, device=device, dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last)
        if variant.folded_stem:
            network.conv1 = FoldedStem(network.conv1)
            x = fold(x)
        self.variant, self.x, self.device = variant, x, device
        self.network = network.to(memory_format=torch.channels_last)
        self.compiled = torch.compile(self.network, dynamic=False, mode=variant.mode)

    def pass_once(self) -> None:
        """Run forward and backward; gradients are new."""
        self.network.zero_grad(set_to_none=True)
        with self._settings(), torch.autocast(self.device.type, torch.bfloat16):
            self.compiled(self.x).float().square().mean().backward()

    def _settings(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        known = {name: v for name, v in self.variant.options.items() if hasattr(inductor, name)}
        stack.enter_context(inductor.patch(known))
        budget = {"activation_memory_budget": self.variant.memory_budget}
        stack.enter_context(functorch.patch(budget))
        stack.enter_context(
            torch.backends.cudnn.flags(enabled=True, benchmark=self.variant.cudnn_benchmark)
        )
        return stack

    def gradients(self) -> Tensor:
        """Return all gradients of one pass in one row."""
        self.pass_once()
        found = [p.grad for p in self.network.parameters()]
        return torch.cat([each.flatten().double() for each in found if each is not None])


def measure(names: list[str], arguments: argparse.Namespace) -> dict[str, object]:
    """Time the named variants, always next to today's network."""
    device = torch.device(arguments.device)
    reference: Tensor | None = None
    found: dict[str, dict[str, float | str]] = {}
    today = Contestant(VARIANTS["network"], arguments.views, arguments.size, device)
    reference = today.gradients()
    for name in names:
        torch._dynamo.reset()  # a fresh compilation; the compiled code of `today` stays in use
        begin = time.perf_counter()
        try:
            one = Contestant(VARIANTS[name], arguments.views, arguments.size, device)
            gradients = one.gradients()
            seconds = time.perf_counter() - begin
            memory = _peak_memory(one.pass_once, device)
            today = Contestant(VARIANTS["network"], arguments.views, arguments.size, device)
            contestants = {"network": today.pass_once, name + " variant": one.pass_once}
            ms = race(contestants, device.type, arguments.rounds)
        except Exception as error:  # a variant that fails must not end the others
            found[name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
            continue
        own, base = ms[name + " variant"], ms["network"]
        found[name] = {
            "ms": own,
            "network ms": base,
            "speed relative to the network": base / own,
            "peak GB": memory / 1e9,
            "seconds to compile": seconds,
            "relative difference of gradients": float(
                (gradients - reference).norm() / reference.norm()
            ),
        }
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    return {"variants": found}


def _peak_memory(function: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    function()
    return float(torch.cuda.max_memory_allocated())


KINDS = {  # parts of a kernel's name, in the order in which they are tried
    "convolution, weight gradient": ("wgrad",),
    "convolution, input gradient": ("dgrad",),
    "convolution, forward": ("fprop", "conv", "implicit_gemm"),
    "matrix product": ("gemm", "nvjet", "cutlass"),
    "reduction": ("triton_red", "triton_per", "native_batch_norm"),
    "pointwise": ("triton_poi", "elementwise", "copy"),
}


def profile(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the time of each kind of kernel in today's network, and the slowest kernels."""
    device = torch.device(arguments.device)
    one = Contestant(VARIANTS["network"], arguments.views, arguments.size, device)
    return kernel_times(one, KINDS)


def kernel_times(one: Contestant, names: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """Return milliseconds per pass for each kind of kernel, and of the slowest kernels."""
    for _ in range(3):
        one.pass_once()
    passes = 5
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if one.device.type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[kind]) as recorded:
        for _ in range(passes):
            one.pass_once()
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    is_cuda = one.device.type == "cuda"
    for event in recorded.key_averages():
        total = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        ms = total / 1e3 / passes
        name = event.key.lower()
        match = (kind for kind, parts in names.items() if any(part in name for part in parts))
        kinds[next(match, "other")] += ms
        kernels[event.key[:110]] += ms
    slowest = sorted(kernels.items(), key=lambda item: -item[1])[:40]
    return {"ms by kind": dict(kinds), "ms of the slowest kernels": dict(slowest)}


def main() -> None:
    """Measure the variants and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", nargs="*", choices=[*VARIANTS, []], metavar="VARIANT")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--views", type=int, default=512)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    names = arguments.variant or [name for name in VARIANTS if name != "network"]
    found = profile(arguments) if arguments.profile else measure(names, arguments)
    print(json.dumps({**environment(arguments.device), **found}))


if __name__ == "__main__":
    main()
