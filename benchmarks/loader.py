"""Time loading of JPEG files into device batches: streaming, resident, and torch's DataLoader.

    python benchmarks/loader.py --workers 16                        # H200
    python benchmarks/loader.py --images 256 --rounds 1             # 2 CPU cores

Prints one JSON line, in images per second. Files are 500 x 375 at quality 90, made of noise with
the spectrum of photographs. `streaming` and `usual` are timed in turn. `usual` is torch's
DataLoader with as many processes, Pillow, and torchvision's two random crops to 224 pixels. Our
loaders leave these crops to the device (benchmarks/augment.py measures their time). Both deliver
uint8. `decoder` is one thread that only decodes. `decode` is the construction of Resident, which
decodes all files into device memory.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from compressive.data.loaders import Resident, Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source
from compressive.data.sources import open_source

HEIGHT, WIDTH = 375, 500


def noise(side: int, slope: float, rng: np.random.Generator) -> np.ndarray:
    """Return square noise of mean 0 and deviation 1 whose amplitude decreases with frequency."""
    down = np.fft.fftfreq(side)[:, None] * side
    across = np.fft.rfftfreq(side)[None] * side
    spectrum = rng.normal(size=(side, across.size, 2)) @ [1, 1j]
    found = np.fft.irfft2(spectrum / np.hypot(down, across).clip(1) ** slope, (side, side))
    return (found - found.mean()) / found.std()


def write_photos(folder: str, count: int) -> float:
    """Write crops of one large image to the folder; return the mean file size in kilobytes."""
    rng = np.random.default_rng(0)
    # Brightness has a spectrum of 1 / frequency, as in photographs; color is smoother.
    light, *tints = (noise(2048, slope, rng) for slope in (1.0, 1.5, 1.5, 1.5))
    planes = [128 + 34 * light + 20 * tint for tint in tints]
    large = np.stack(planes, -1).clip(0, 255).astype(np.uint8)
    total = 0
    for i in range(count):
        top, left = rng.integers(0, (2048 - HEIGHT, 2048 - WIDTH))
        path = Path(folder) / f"{i:05}.jpg"
        piece = large[top : top + HEIGHT, left : left + WIDTH]
        Image.fromarray(piece).save(path, quality=90)
        total += path.stat().st_size
    return total / count / 1e3


class Crops(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two random crops of each file, made in a worker process."""

    def __init__(self, source: Source, times: int) -> None:
        self.paths = [source.origin(i) for i in range(len(source))] * times
        resample = v2.InterpolationMode.BICUBIC
        self.crop = v2.RandomResizedCrop(224, scale=(0.08, 1.0), interpolation=resample)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        with Image.open(self.paths[i]) as file:
            image = file.convert("RGB")
        one, two = (v2.functional.pil_to_tensor(self.crop(image)) for _ in range(2))
        return one, two


def plan(count: int, batch: int, times: int) -> Iterator[BatchIndices]:
    """Yield each image `times` times, in a new order each time."""
    generator = torch.Generator().manual_seed(0)
    for epoch in range(times):
        for index in torch.randperm(count, generator=generator).split(batch):
            yield BatchIndices(index, torch.full_like(index, epoch))


def rate(images: int, device: str, act: Callable[[], object]) -> float:
    """Return images per second of `act`, which processes `images` images."""
    begin = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - begin)


def exhaust(batches: Iterable[object]) -> None:
    """Iterate over all batches."""
    for _ in batches:
        pass


def usual(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
    """Copy all batches of one pass to the device."""
    for crops in loader:
        for crop in crops:
            crop.to(device, non_blocking=True)


def race(source: Source, arguments: argparse.Namespace) -> dict[str, float]:
    """Return images per second of streaming and of the usual way, timed in turn."""
    device, times, workers = arguments.device, arguments.times, arguments.workers
    # Batches of 64 images, because all prefetched ones are in shared memory, which is often small.
    dataset, pinned = Crops(source, times), device == "cuda"
    loader = DataLoader(
        dataset, 64, num_workers=workers, pin_memory=pinned, persistent_workers=True
    )
    ours = Streaming(source, side=arguments.side, device=device, workers=workers)
    passes: dict[str, Callable[[], object]] = {
        "streaming": lambda: exhaust(ours.batches(plan(len(source), arguments.batch, times))),
        "usual": lambda: usual(loader, device),
    }
    rates: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(arguments.rounds + 1):
        for name, act in passes.items():
            found = rate(len(dataset), device, act)
            if turn:  # the first round starts processes and pins memory
                rates[name].append(found)
    return {name: statistics.median(found) for name, found in rates.items()}


def hold(source: Source, arguments: argparse.Namespace) -> dict[str, float]:
    """Return images per second of decoding in one thread, of building Resident, of its batches."""
    device, count, held = arguments.device, len(source), list[Resident]()

    def start() -> None:
        options = {"side": arguments.side, "device": device, "workers": arguments.workers}
        held.append(Resident(source, **options))

    def batches() -> None:
        exhaust(held[0].batches(plan(count, arguments.batch, arguments.times)))

    few = range(min(count, 256))
    return {
        "decoder": rate(len(few), "cpu", lambda: [source.image(i) for i in few]),
        "decode": rate(count, device, start),
        "resident": rate(count * arguments.times, device, batches),
    }


def main() -> None:
    """Write files, measure all loaders and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--times", type=int, default=2, help="repetitions of each image in a pass")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = write_photos(folder, arguments.images)
        source = open_source(folder)
        rates = race(source, arguments) | hold(source, arguments)
    report = {"benchmark": "loader", **vars(arguments), "KB per file": round(kilobytes, 1)}
    report["images/s"] = {name: float(f"{found:.4g}") for name, found in rates.items()}
    report["streaming_over_usual"] = round(rates["streaming"] / rates["usual"], 2)
    print(json.dumps(report | environment(arguments.device, "torchvision", "pillow", "numpy")))


if __name__ == "__main__":
    main()
