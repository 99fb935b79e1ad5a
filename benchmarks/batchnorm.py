"""Time a compiled ResNet with other reductions in its batch norms against the plain one.

    python benchmarks/batchnorm.py                 # on an H200; about 200 seconds
    python benchmarks/batchnorm.py all pooled      # some variants
    python benchmarks/batchnorm.py --only layers   # bandwidth of the kernels; 20 seconds
    python benchmarks/batchnorm.py --network resnet18-cifar all

Prints JSON lines as results arrive. First the bandwidth of the kernels for each shape of layer, and
the choice of tiles. Then, for each variant, milliseconds per forward and backward pass over 512
views of 224 pixels in bfloat16 (resnet18-cifar: 1,024 of 32 pixels), always next to the plain
network. Gradients are compared with those of the plain network in float32: `noise` is the
difference of the plain network in bfloat16.

Variants: `fused` (Triton kernels), `pooled` (also fuses the max-pool of the stem with its norm),
`all` (also computes the first convolution over blocks of pixels, as train.fused_norm does), `sums`
(the same sums in plain PyTorch, no Triton), `cooperative` and `tiled` (options of torch.compile for
the plain network).
"""

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from network import KINDS, Contestant, Variant, kernel_times
from timing import captured, environment, race

from compressive.fused_norm import functional, fuse, reductions

START = time.perf_counter()
SECONDS_OF_A_VARIANT = 45  # no variant starts later than this before the limit
# (channels, side, layers) of the batch norms of ResNet-50 at 224 pixels
LAYERS = [
    (64, 112, 1),
    (64, 56, 6),
    (256, 56, 4),
    (128, 56, 1),
    (128, 28, 7),
    (512, 28, 5),
    (256, 28, 1),
    (256, 14, 11),
    (1024, 14, 7),
    (512, 14, 1),
    (512, 7, 5),
    (2048, 7, 4),
]
TILES = [
    reductions.ReductionTile(columns, unroll, warps, 132 * per_processor)
    for columns, unroll, warps, per_processor in (
        (128, 4, 4, 8),
        (128, 2, 4, 8),
        (256, 4, 4, 8),
        (64, 4, 4, 8),
        (128, 4, 8, 4),
    )
]
OPTIONS: dict[str, dict[str, object]] = {
    "cooperative": {"triton.cooperative_reductions": True},
    "tiled": {"triton.prefer_nd_tiling": True, "triton.tile_reductions": True},
}
OWN_KINDS = {  # parts of the names of our kernels
    "pool": ("_pool_",),
    "moments": ("_moments_kernel",),
    "gradient sums": ("_gradient_kernel",),
    "partial sums": ("_add_parts_kernel",),
}
VARIANTS = ("all", "pooled", "fused", "sums", *OPTIONS)
SIZES = {"resnet50": (512, 224), "resnet18-cifar": (1024, 32)}  # views and their pixels


def report(**line: object) -> None:
    """Print a JSON line now, so that a timeout loses nothing."""
    line = {**line, "seconds since the start": round(time.perf_counter() - START, 1)}
    print(json.dumps(line), flush=True)


# --- layers ---------------------------------------------------------------------------------------


def images(channels: int, side: int, views: int, device: str) -> Tensor:
    """Return random activations in bfloat16 and channels_last memory format."""
    shape = (views, side, side, channels)
    return torch.randn(shape, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)


def layers(arguments: argparse.Namespace) -> None:
    """Choose the tiles with the least total time over all layers, and report bandwidths."""
    torch.manual_seed(0)
    device = arguments.device
    times: dict[str, dict[reductions.ReductionTile, float]] = {"moments": {}, "gradient sums": {}}
    for channels, side, count in LAYERS:
        x, grad = (images(channels, side, arguments.views, device) for _ in range(2))
        mean, inverse, scale, bias = torch.randn(4, channels, device=device).unbind()
        rows: Any = mean, inverse, scale, bias
        line: dict[str, object] = {"channels": channels, "side": side, "layers": count}
        gigabytes = x.numel() * 2 / 1e9
        for tile in TILES:
            calls = {
                "moments": lambda x=x, t=tile: reductions.launch_moments(x, t),
                "gradient sums": lambda x=x, g=grad, r=rows, t=tile: (
                    reductions.launch_gradient_sums(g, x, r, True, t)
                ),
            }
            for name, call in calls.items():
                ms = _milliseconds(call, device)
                times[name][tile] = times[name].get(tile, 0.0) + count * ms
                line[f"{name} {_named(tile)} TB/s"] = _rate(gigabytes, name, ms)
        natives: dict[str, Callable[[], object]] = {
            "moments": lambda x=x: torch.batch_norm_stats(x, 1e-5),
            "gradient sums": lambda x=x, g=grad, r=rows: torch.batch_norm_backward_reduce(
                g, x, r[0], r[1], r[2], True, True, True
            ),
        }
        for name, call in natives.items() if device == "cuda" else ():
            line[f"{name} native TB/s"] = _rate(gigabytes, name, _milliseconds(call, device))
        report(**line)
    best = {name: min(found, key=lambda tile: found[tile]) for name, found in times.items()}
    reductions.MOMENTS_TILE, reductions.GRADIENT_TILE = best["moments"], best["gradient sums"]
    report(
        tiles={name: tile._asdict() for name, tile in best.items()},
        **{
            f"ms of all {name}": {_named(tile): ms for tile, ms in found.items()}
            for name, found in times.items()
        },
    )


def _named(tile: reductions.ReductionTile) -> str:
    return f"{tile.columns}x{tile.unroll}x{tile.warps}x{tile.programs // 132}"


def _rate(gigabytes: float, name: str, ms: float) -> float:
    return round((1 if name == "moments" else 2) * gigabytes / ms, 3)


def _milliseconds(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        call()
        return 1.0
    replay = captured(call)  # without the time of launches
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    before.record()
    for _ in range(5):
        replay()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 5


# --- the network ----------------------------------------------------------------------------------


class PlainSums:
    """The sums of `reductions` in PyTorch, for torch.compile to fuse."""

    @staticmethod
    def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance per channel, from deviations from a sample."""
        count = x.numel() // x.shape[1]
        center = x[:, :, :1, :1].float().mean(0, keepdim=True)
        deviation = x.float() - center
        offset = deviation.sum((0, 2, 3)) / count
        square = deviation.square().sum((0, 2, 3)) / count
        return center.flatten() + offset, (square - offset.square()).clamp(min=0)

    @staticmethod
    def batch_gradient_sums(
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        inverse: Tensor,
        scale: Tensor,
        bias: Tensor,
        has_relu: bool,
    ) -> Tensor:
        """Return sums of gradients, and of gradients times normalized x."""
        mean, slope, offset = (row.view(1, -1, 1, 1) for row in (mean, scale, bias))
        deviation, slant = x.float() - mean, grad.float()
        if has_relu:
            slant = torch.where(deviation * slope + offset > 0, slant, 0.0)
        return torch.stack((slant.sum((0, 2, 3)), (slant * deviation).sum((0, 2, 3)) * inverse))


class Normalized(Contestant):
    """A network with the batch norms of a variant."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        device = torch.device(arguments.device)
        super().__init__(Variant(), arguments.views, arguments.size, device, arguments.network)
        self.name = name
        self.target: Tensor | None = None
        randomize(self.network)
        if name in ("all", "pooled", "fused", "sums"):
            parts = {"pool": name in ("all", "pooled"), "blocks": name == "all"}
            self.fused = fuse.fuse(self.network, **parts)

    def _settings(self) -> contextlib.ExitStack:
        stack = super()._settings()
        stack.enter_context(inductor.patch(OPTIONS.get(self.name, {})))
        if self.name == "sums":
            stack.enter_context(mock.patch.object(functional, "reductions", PlainSums))
        return stack

    def pass_once(self) -> None:
        """Run forward and backward. The loss depends on each feature of each view."""
        self.network.zero_grad(set_to_none=True)
        with self._settings(), torch.autocast(self.device.type, torch.bfloat16):
            self.loss(self.compiled(self.x)).backward()

    def loss(self, features: Tensor) -> Tensor:
        """Return a random linear function; norms make the mean square nearly constant."""
        if self.target is None:
            torch.manual_seed(2)
            self.target = torch.randn_like(features, dtype=torch.float32)
        return (features.float() * self.target).mean()

    def each_gradient(self) -> list[Tensor]:
        """Return the gradient of each parameter in one pass."""
        self.pass_once()
        return [p.grad.double().flatten() for p in self.network.parameters()]


def randomize(network: nn.Module) -> None:
    """Give norms random weights. Those of the last norms of blocks are 0, which hides errors.

    They stay small: with large ones, rounding errors grow from block to block.
    """
    torch.manual_seed(1)
    norms = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    last = "bn3" if any(name.endswith("bn3") for name in norms) else "bn2"
    for name, module in norms.items():
        largest = 0.2 if name.endswith(last) else 1.0
        nn.init.uniform_(module.weight, largest / 2, largest)
        nn.init.uniform_(module.bias, -0.2 * largest, 0.2 * largest)


def exact_gradients(arguments: argparse.Namespace) -> list[Tensor]:
    """Return the gradients of the plain network in float32, without torch.compile."""
    plain = Normalized("network", arguments)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        plain.loss(plain.network(plain.x.float())).backward()
    found = [p.grad.double().flatten() for p in plain.network.parameters()]
    if arguments.device == "cuda":
        del plain
        torch.cuda.empty_cache()
    return found


def difference(found: list[Tensor], reference: list[Tensor]) -> float:
    """Return the relative difference of all gradients together."""
    a, b = torch.cat(found), torch.cat(reference)
    return float((a - b).norm() / b.norm())


def networks(arguments: argparse.Namespace) -> None:
    """Time the variants next to the plain network."""
    plain = Normalized("network", arguments)
    base = plain.each_gradient()
    report(network="compiled")
    exact = exact_gradients(arguments)
    noise = [float((a - b).norm() / b.norm()) for a, b in zip(base, exact, strict=True)]
    report(
        noise=difference(base, exact),
        **{"noise, repeated": difference(plain.each_gradient(), base)},
    )
    for name in arguments.variant or VARIANTS:
        left = arguments.seconds - (time.perf_counter() - START)
        if left < SECONDS_OF_A_VARIANT:
            report(variant=name, skipped=f"{left:.0f} seconds are left")
            continue
        try:
            report(variant=name, **_measure(name, plain, base, exact, noise, arguments))
        except Exception:  # a variant that fails must not end the others
            report(variant=name, error=traceback.format_exc()[-3000:])


def _measure(
    name: str,
    plain: Normalized,
    base: list[Tensor],
    exact: list[Tensor],
    noise: list[float],
    arguments: argparse.Namespace,
) -> dict[str, object]:
    begin = time.perf_counter()
    one = Normalized(name, arguments)
    found = one.each_gradient()
    seconds = time.perf_counter() - begin
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one.pass_once()
    peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else 0
    while arguments.after and not arguments.after.exists():
        time.sleep(0.2)
    ms = race({"network": plain.pass_once, name: one.pass_once}, arguments.device, arguments.rounds)
    own = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    ratios = [a / max(b, 1e-9) for a, b in zip(own, noise, strict=True)]
    result: dict[str, object] = {
        "ms": ms[name],
        "network ms": ms["network"],
        "speed relative to the network": ms["network"] / ms[name],
        "norms": getattr(one, "fused", 0),
        "peak GB": peak / 1e9,
        "seconds to compile": seconds,
        "difference from float32": difference(found, exact),
        "difference from the network": difference(found, base),
        "largest difference of a parameter relative to its noise": max(ratios),
        "median": sorted(ratios)[len(ratios) // 2],
    }
    report(variant=name, **result)  # the profile below may fail
    return result | kernel_times(one, {**OWN_KINDS, **KINDS})


def main() -> None:
    """Measure layers and networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", nargs="*", choices=[*VARIANTS, []], metavar="VARIANT")
    parser.add_argument("--only", choices=["layers", "networks"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", choices=list(SIZES), default="resnet50")
    parser.add_argument("--views", type=int, help="views per pass")
    parser.add_argument("--size", type=int, help="pixels of a view")
    parser.add_argument("--after", type=Path, help="compile, but wait for this file before timing")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=200, help="start no variant near this limit"
    )
    arguments = parser.parse_args()
    views, size = SIZES[arguments.network]
    arguments.views, arguments.size = arguments.views or views, arguments.size or size
    report(**environment(arguments.device, "triton"))
    for name, part in (("layers", layers), ("networks", networks)):
        if arguments.only in (None, name):
            try:
                part(arguments)
            except Exception:
                report(part=name, error=traceback.format_exc()[-3000:])


if __name__ == "__main__":
    main()
