"""Time image decoders: torchcodec against torchvision (JPEG, WebP) and Pillow (PNG).

    python benchmarks/decoders.py

Prints one JSON line: milliseconds of `decode` per image of 500 x 375 pixels in one thread, with
torchcodec and with the fallback, and their ratio (above 1: torchcodec is faster). Both are timed in
turn, in processor time, which other processes change little; the median counts. Their pixels are
compared first.
"""

import argparse
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from loader import HEIGHT, WIDTH, noise
from timing import environment

from compressive.data import decode as decode_module

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {"quality": 90}),
    "jpeg_progressive": ("JPEG", {"quality": 90, "progressive": True}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {"quality": 90}),
    "webp_lossless": ("WEBP", {"lossless": True}),
}


def photo() -> Image.Image:
    """Return noise with the spectrum of photographs."""
    rng = np.random.default_rng(0)
    light, *tints = (noise(512, slope, rng) for slope in (1.0, 1.5, 1.5, 1.5))
    planes = [128 + 34 * light + 20 * tint for tint in tints]
    pixels = np.stack(planes, -1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels[:HEIGHT, :WIDTH])


def processor_times(
    functions: dict[str, Callable[[], torch.Tensor]], rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of processor time of each function, called in turn."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.thread_time()
            function()
            found[name].append(1000 * (time.thread_time() - began))
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Time every kind of file and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    codec = decode_module.torchcodec_decoder()
    if codec is None:
        sys.exit("torchcodec is not installed or does not load")

    def with_decoder(data: bytes, decoder: object) -> Callable[[], torch.Tensor]:
        def timed() -> torch.Tensor:
            decode_module.torchcodec_decoder = lambda: decoder  # type: ignore[assignment]
            return decode_module.decode(data)

        return timed

    picture, found = photo(), {}
    for name, (kind, options) in KINDS.items():
        file = io.BytesIO()
        picture.save(file, kind, **options)
        functions: dict[str, Callable[[], torch.Tensor]] = {
            "torchcodec": with_decoder(file.getvalue(), codec),
            "fallback": with_decoder(file.getvalue(), None),
        }
        assert torch.equal(*(function() for function in functions.values())), name
        times = processor_times(functions, rounds)
        ratio = times["fallback"] / times["torchcodec"]
        found[name] = {key: round(value, 3) for key, value in times.items()}
        found[name]["ratio"] = round(ratio, 2)
    packages = ("torchcodec", "torchvision", "pillow")
    print(json.dumps({"decode_ms": found, **environment("cpu", *packages)}))


if __name__ == "__main__":
    main()
