"""Images from JPEG files to batches on the device: ours streamed, ours resident, and the usual way.

    python benchmarks/loader.py --workers 16                        # H200
    python benchmarks/loader.py --images 256 --rounds 1             # 2 CPU cores

Prints one JSON line, in images per second. Files are 500 x 375 at quality 90, made of noise with
the spectrum of photographs. `streaming` and `usual` are timed in turn; `usual` is torch's
DataLoader with as many processes, Pillow and torchvision's two random crops to 224 pixels, which
ours leaves to the device (benchmarks/augment.py has their price). Both deliver uint8. `decoder` is
one thread that does nothing else, and `decode` is Resident's start: files to device memory.
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
    """A square of mean 0 and deviation 1 whose amplitudes fall with the frequency."""
    down = np.fft.fftfreq(side)[:, None] * side
    across = np.fft.rfftfreq(side)[None] * side
    spectrum = rng.normal(size=(side, across.size, 2)) @ [1, 1j]
    found = np.fft.irfft2(spectrum / np.hypot(down, across).clip(1) ** slope, (side, side))
    return (found - found.mean()) / found.std()


def write_photos(folder: str, count: int) -> float:
    """Fill the folder with pieces of one large picture; their mean size in kilobytes."""
    rng = np.random.default_rng(0)
    # Light as in photographs, one over the frequency; color smoother.
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
    """Each image `times` times, in another order each time."""
    generator = torch.Generator().manual_seed(0)
    for epoch in range(times):
        for index in torch.randperm(count, generator=generator).split(batch):
            yield BatchIndices(index, torch.full_like(index, epoch))


def rate(images: int, device: str, act: Callable[[], object]) -> float:
    """Images per second of an act that goes through so many."""
    begin = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - begin)


def exhaust(batches: Iterable[object]) -> None:
    """Ask for all of them, and keep none."""
    for _ in batches:
        pass


def usual(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
    """One pass, copied to the device from pinned memory."""
    for crops in loader:
        for crop in crops:
            crop.to(device, non_blocking=True)


def race(source: Source, arguments: argparse.Namespace) -> dict[str, float]:
    """Images per second of streaming and of the usual way, in turn."""
    device, times, workers = arguments.device, arguments.times, arguments.workers
    # Batches of 64, for all of them lie in shared memory, which is often small.
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
    """Images per second of one thread's decoder, of Resident's start and of its batches."""
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
    """Write files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--times", type=int, default=2, help="how often each, in a pass")
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
