"""Time the paper's random views: 512 of 224 pixels from 256-pixel uint8, and 1024 of 32 pixels.

    python benchmarks/augment.py --device cuda --rounds 50          # H200
    python benchmarks/augment.py --scale 16                         # CPU, a sixteenth of the views

Prints one JSON line with the median milliseconds and views per second of our eager and compiled
views, of kornia with the same settings if it is installed, and of a copy of the output as a lower
bound. `draw` is the time for the random parameters alone, eager. `float16` computes products in
half precision.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment, race

from compressive.augment.ops import MEAN, STD, augment, blur_taps
from compressive.augment.params import View, draw
from compressive.rng import image_keys

CASES = {"512 views of 224 px from 256 px": (512, 256, 224), "1024 of 32 px": (1024, 32, 32)}


def kornia(view: View, images: torch.Tensor, size: int) -> Callable[[], object]:
    """Return kornia's operators with the same settings, random for each image."""
    from kornia import augmentation as K  # pyright: ignore

    taps = blur_taps(size)
    steps = torch.nn.Sequential(
        K.RandomResizedCrop((size, size), (view.crop_scale_min, 1.0), resample="BICUBIC"),
        K.RandomHorizontalFlip(view.flip),
        K.ColorJitter(
            view.brightness, view.contrast, view.saturation, view.hue, p=view.jitter
        ),  # kornia draws one order of the color changes for the whole batch
        K.RandomGrayscale(p=view.gray),
        K.RandomGaussianBlur((taps, taps), (view.sigma_min, view.sigma_max), p=view.blur),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )
    return lambda: steps(images.float() / 255)


def entrants(
    n: int, source: int, size: int, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    view = View()
    images = torch.randint(0, 256, (n, 3, source, source), dtype=torch.uint8, device=device)
    keys = image_keys(torch.arange(n, device=device), seed=0)
    compiled = torch.compile(augment, fullgraph=True, dynamic=False)
    output = torch.empty(n, 3, size, size, dtype=dtype, device=device)
    functions: dict[str, Callable[[], object]] = {
        "eager": partial(augment, images, keys, view, size, dtype=dtype),
        "compiled": partial(compiled, images, keys, view, size, dtype=dtype),
        "draw": partial(draw, keys, view, source, source),
        "copy": output.clone,
    }
    if device == "cuda":
        functions["compiled_float16"] = partial(
            compiled, images, keys, view, size, dtype=dtype, products=torch.float16
        )
    if importlib.util.find_spec("kornia"):
        functions["kornia"] = kornia(view, images, size)
    return functions


def main() -> None:
    """Time all cases and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides the number of views")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.device == "cuda":
        torch.set_float32_matmul_precision("high")  # tf32 rounds to 2**-11, like float16
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    results = {}
    for name, (n, source, size) in CASES.items():
        n //= arguments.scale
        times = race(
            entrants(n, source, size, arguments.device, dtype), arguments.device, arguments.rounds
        )
        times = {who: float(f"{ms:.4g}") for who, ms in times.items()}
        rates = {who: round(1e3 * n / ms) for who, ms in times.items() if who != "draw"}
        results[name] = {"views": n, "ms": times, "views/s": rates}
        if "kornia" in times:
            results[name]["compiled_over_kornia"] = round(times["kornia"] / times["compiled"], 2)
    report = {"benchmark": "augment", "device": arguments.device, "dtype": str(dtype)}
    report |= {"rounds": arguments.rounds, "results": results}
    print(json.dumps(report | environment(arguments.device, "kornia")))


if __name__ == "__main__":
    main()
