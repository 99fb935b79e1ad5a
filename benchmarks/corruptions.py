"""Time the 15 corruptions of ImageNet-C at all 5 severities on images of 32 or 224 pixels.

    python benchmarks/corruptions.py --device cuda                              # H200: CIFAR-10
    python benchmarks/corruptions.py --device cuda --size 224 --images 1024 --batch 256
    python benchmarks/corruptions.py --images 200 --one-by-one 20               # CPU

Prints one JSON line with the seconds of the whole grid, images per second, milliseconds of each
type over its five severities, and peak memory. --one-by-one adds the usual implementation of some
types, NumPy and SciPy on one image at a time, in microseconds per image, with our time and the
ratio.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment

from compressive.corruptions.corrupt import corrupt, default_table
from compressive.corruptions.parameters import NAMES, TABLES

FROST = (
    (900, 600),
    (560, 315),
    (560, 315),
    (527, 350),
    (660, 495),
    (485, 323),
)  # sizes of the published photographs


def pictures(count: int, size: int, device: str) -> torch.Tensor:
    """Return smooth random images, so that JPEG and blur process something like photographs."""
    coarse = torch.rand(count, 3, size // 4, size // 4, device=device)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return (255 * smooth).to(torch.uint8)


def grid(images: torch.Tensor, batch: int, frost: list[torch.Tensor]) -> dict[str, float]:
    """Return the seconds of each type over five severities and all images."""
    index = torch.arange(len(images), device=images.device)
    seconds = {}
    for name in NAMES:
        wait(images)
        start = time.perf_counter()
        for severity in range(1, 6):
            for part, at in zip(images.split(batch), index.split(batch), strict=True):
                corrupt(part, name, severity, index=at, frost=frost)
        wait(images)
        seconds[name] = time.perf_counter() - start
    return seconds


def wait(images: torch.Tensor) -> None:
    """Wait until the device has finished all work."""
    if images.is_cuda:
        torch.cuda.synchronize()


def one_by_one(size: int) -> dict[str, Callable[[NDArray[np.uint8], int], object]]:
    """Return usual implementations of some types, for one channels-last image and a severity."""
    from scipy.ndimage import gaussian_filter, zoom

    table, draw = TABLES[default_table(size)], np.random.default_rng(0)

    def gaussian_noise(x: NDArray[np.uint8], severity: int) -> object:
        (sigma,) = table["gaussian_noise"][severity - 1]
        return np.uint8(np.clip(x / 255.0 + draw.normal(size=x.shape, scale=sigma), 0, 1) * 255)

    def shot_noise(x: NDArray[np.uint8], severity: int) -> object:
        (c,) = table["shot_noise"][severity - 1]
        return np.uint8(np.clip(draw.poisson(x / 255.0 * c) / c, 0, 1) * 255)

    def glass_blur(x: NDArray[np.uint8], severity: int) -> object:
        sigma, reach, passes = table["glass_blur"][severity - 1]
        reach = int(reach)
        smooth = gaussian_filter(x / 255.0, (sigma, sigma, 0), mode="nearest")
        x = (255 * smooth).astype(np.uint8)
        for _ in range(int(passes)):
            for h in range(size - reach, reach, -1):
                for w in range(size - reach, reach, -1):
                    dx, dy = draw.integers(-reach, reach, 2)
                    x[h, w] = x[h + dy, w + dx]
        return np.uint8(gaussian_filter(x / 255.0, (sigma, sigma, 0), mode="nearest") * 255)

    def zoom_blur(x: NDArray[np.uint8], severity: int) -> object:
        factors = np.arange(1, *table["zoom_blur"][severity - 1])
        total = light = x / 255.0
        for factor in factors:
            part = int(np.ceil(size / factor))
            start = (size - part) // 2
            middle = light[start : start + part, start : start + part]
            grown = np.asarray(zoom(middle, (factor, factor, 1), order=1))
            start = (len(grown) - size) // 2
            total = total + grown[start : start + size, start : start + size]
        return np.uint8(total / (len(factors) + 1) * 255)

    def jpeg_compression(x: NDArray[np.uint8], severity: int) -> object:
        file = BytesIO()
        Image.fromarray(x).save(
            file, "JPEG", quality=int(table["jpeg_compression"][severity - 1][0])
        )
        return np.asarray(Image.open(file))

    types = (gaussian_noise, shot_noise, glass_blur, zoom_blur, jpeg_compression)
    return {function.__name__: function for function in types}


def compared(
    images: torch.Tensor, count: int, ours: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Return microseconds per image over the five severities, of the usual way and of ours."""
    host = images[:count].permute(0, 2, 3, 1).contiguous().cpu().numpy()
    found = {}
    for name, function in one_by_one(images.shape[-1]).items():
        start = time.perf_counter()
        for severity in range(1, 6):
            for image in host:
                function(image, severity)
        usual = 1e6 * (time.perf_counter() - start) / (5 * count)
        here = 1e6 * ours[name] / (5 * len(images))
        times = {"one_by_one": usual, "ours": here, "ratio": usual / here}
        found[name] = {who: float(f"{value:.4g}") for who, value in times.items()}
    return found


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=5000)
    parser.add_argument("--one-by-one", type=int, default=0, metavar="COUNT")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = pictures(arguments.images, arguments.size, arguments.device)
    make = partial(torch.randint, 0, 256, dtype=torch.uint8, device=arguments.device)
    frost = [make((3, h, w)) for w, h in FROST]
    grid(
        images[: min(arguments.batch, 64)], arguments.batch, frost
    )  # warm-up: the first calls load kernels
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = grid(images, arguments.batch, frost)
    total = sum(seconds.values())
    report = {"benchmark": "corruptions", "device": arguments.device}
    report |= {"images": arguments.images, "size": arguments.size, "batch": arguments.batch}
    report |= {"seconds": float(f"{total:.4g}"), "images/s": round(75 * len(images) / total)}
    report["ms"] = {name: float(f"{1e3 * value:.4g}") for name, value in seconds.items()}
    if arguments.device == "cuda":
        report["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if arguments.one_by_one:
        report["us_per_image"] = compared(images, arguments.one_by_one, seconds)
    print(json.dumps(report | environment(arguments.device, "scipy", "pillow")))


if __name__ == "__main__":
    main()
