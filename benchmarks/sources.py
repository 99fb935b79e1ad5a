"""Time reading and decoding of the same images from files, shards and an S3 server, in one run.

    python benchmarks/sources.py --images 1000

Prints one JSON line, in images per second. Files are JPEG of 500 x 375 pixels at quality 90.
`pack` writes the shards. The S3 server is moto, a process on the loopback interface: it shares the
cores and has no network delay. `first epoch` starts with an empty cache, `next epoch` reads from
the cache on disk. Batches are in random order. All sources are timed in turn; the median counts.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from loader import write_photos
from timing import environment

from compressive.data.loaders import Streaming
from compressive.data.pack import pack_images
from compressive.data.sampler import BatchIndices
from compressive.data.sources import open_source
from compressive.progress import Display
from compressive.storage.mirror import Mirror


def rate(place: str, batch: int) -> tuple[float, float]:
    """Return the seconds to open a source, and images per second of one epoch."""
    began = time.perf_counter()
    source = open_source(place)
    opened = time.perf_counter()
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    plan = [BatchIndices(index, torch.zeros_like(index)) for index in order.split(batch)]
    with Streaming(source, side=512, device="cpu") as loader:
        for _ in loader.batches(plan):
            pass
    return opened - began, len(source) / (time.perf_counter() - opened)


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    """Start moto in its own process; return it and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    return process, f"http://127.0.0.1:{port}"


def main() -> None:
    """Write the images, time all sources and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    process, endpoint = start_server()
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), given.images, given.batch, given.rounds)))
    finally:
        process.terminate()


def measure(root: Path, images: int, batch: int, rounds: int) -> dict[str, object]:
    """Return the results of all sources."""
    from pyarrow import fs

    (root / "files").mkdir()
    kilobytes = write_photos(str(root / "files"), images)
    system = fs.S3FileSystem(
        endpoint_override=os.environ["AWS_ENDPOINT_URL"],
        region="us-east-1",
        allow_bucket_creation=True,
    )
    system.create_dir("bench")
    places = {"files": str(root / "files")}
    for kind in ("tar", "parquet"):
        shards = root / kind
        pack_images(root / "files", shards, kind=kind, display=Display(quiet=True))
        Mirror(f"s3://bench/{kind}", shards).push()
        places[kind] = str(shards)
    os.environ["COMPRESSIVE_CACHE"] = str(root / "cache")
    rates: dict[str, list[float]] = {}
    opening: dict[str, list[float]] = {}
    for _ in range(rounds):
        shutil.rmtree(root / "cache", ignore_errors=True)
        for name, place in places.items():
            _note(name, *rate(place, batch), rates, opening)
        for kind in ("tar", "parquet"):
            for epoch in ("first epoch", "next epoch"):
                _note(f"s3 {kind}, {epoch}", *rate(f"s3://bench/{kind}", batch), rates, opening)
    return {
        "images_per_second": {k: round(statistics.median(v)) for k, v in rates.items()},
        "seconds_to_open": {k: round(statistics.median(v), 2) for k, v in opening.items()},
        "images": images,
        "kilobytes_per_image": round(kilobytes),
        "cores": len(os.sched_getaffinity(0)),
        **environment("cpu", "pyarrow", "torchvision", "torchcodec", "moto"),
    }


def _note(
    name: str,
    seconds: float,
    speed: float,
    rates: dict[str, list[float]],
    opening: dict[str, list[float]],
) -> None:
    rates.setdefault(name, []).append(speed)
    opening.setdefault(name, []).append(seconds)


if __name__ == "__main__":
    main()
