"""Compare training from JPEG files decoded by the CPU and by nvJPEG, and both with the network.

    python benchmarks/device_decode.py speed --lightly     # H200; 16 and 4 cores; about 4 minutes
    python benchmarks/device_decode.py training            # effect of the decoder on accuracy
    python benchmarks/device_decode.py pixels              # difference to libjpeg
    python benchmarks/device_decode.py speed --small       # a test on any machine

Prints one JSON line. `speed` times C-SimCLR with ResNet-50 at 224 pixels and 256 images: the bare
compiled network, steps from device memory, and steps from files with each decoder, in turn in one
process. The number of cores is that of all threads (sched_setaffinity).
Each block first makes some steps that are not timed, until images that were read ahead are used
up. `loader` is the rate of the loaders alone. Memory is the peak of tensors during a block, which
contains all contestants, and what nvJPEG itself allocates. lightly runs in processes of its own.

`training` trains each seed twice on the built-in images as JPEG files with 4:2:0 chroma, once with
the pixels of each decoder. `pixels` compares decoders on generated photographs, before and after
making views.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from loader import HEIGHT, WIDTH, exhaust, noise, plan, rate, write_photos
from step import bare, begun
from timing import environment

from compressive import recipes
from compressive.config import Config, override
from compressive.data import loaders
from compressive.data.decode import decode
from compressive.data.jpeg_header import SUBSAMPLINGS
from compressive.data.loaders import Streaming
from compressive.data.nvjpeg import DeviceDecoder, nvjpeg_decoder
from compressive.data.sources import open_source
from compressive.data.synthetic import CLASSES, pictures
from compressive.device import pick_device
from compressive.progress import Display
from compressive.train.images import some
from compressive.train.log import log
from compressive.train.loop import pretrain, train_step
from compressive.train.run import Run

UNTIMED, TIMED = 8, 20  # steps of a block
SMALL = ("network.name=test_resnet", "network.stem=imagenet", "network.variant=timm")
SMALL += ("network.hidden_dim=16", "network.projection_dim=8")
SMALL += ("health.collapse_std=0", "health.min_participation_ratio=0")


def stand_in(files: list[torch.Tensor]) -> list[torch.Tensor]:
    """Decode on the CPU, to test this script without a GPU."""
    return [decode(bytes(file.numpy())) for file in files]


def device_decoder(device: torch.device) -> DeviceDecoder:
    """Return nvJPEG, or the stand-in on a CPU."""
    if device.type == "cuda":
        return nvjpeg_decoder(device)
    return DeviceDecoder(stand_in, frozenset(SUBSAMPLINGS))


def use_stand_in() -> None:
    """Let runs on a CPU use the stand-in if data.decode_on_device is yes, and not compile."""

    def choose(_: object, device: torch.device, setting: str, **__: object) -> Any:
        return device_decoder(device) if setting == "yes" else None

    loaders.choose_decoder = choose
    torch.compile = lambda network, **_: network  # type: ignore[assignment]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def set_cores(cores: list[int]) -> None:
    """Restrict every thread of this process, and those that it will start, to these cores."""
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:  # it has ended
            continue


def outside_torch() -> int:
    """Return the bytes of device memory that torch's allocator does not hold."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def steps_of(run: Run, workers: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that makes a training step, and one that ends the threads.

    There are as many threads as a run with these cores has, if `workers` is 0.
    """
    if isinstance(run.loader, Streaming):
        run.loader.workers = workers
    batches = run.batches()

    def step() -> None:
        found = train_step(run, batches)
        if run.schedule.is_time_to_log(run.step):
            log(run, found)

    return step, batches.close


def block(run: Run | None, step: Callable[[], None]) -> dict[str, float]:
    """Return milliseconds per step, the share of waiting, and the peak memory of a block."""
    for _ in range(UNTIMED):
        step()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    waited = 0.0 if run is None else run.loader.waited
    begin = time.perf_counter()
    for _ in range(TIMED):
        step()
    synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    waiting = 0.0 if run is None else (run.loader.waited - waited) / seconds
    return {"ms": 1e3 * seconds / TIMED, "wait": waiting, "peak_gib": peak / 2**30}


def speed(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all contestants with all and with four cores."""
    began, device = time.monotonic(), pick_device("auto")
    photos = folder / "photos"
    photos.mkdir()
    size = write_photos(str(photos), 64 if asked.small else 2048)
    every = sorted(os.sched_getaffinity(0))
    counts = sorted({min(16, len(every)), min(4, len(every))}, reverse=True)
    answer: dict[str, Any] = {"kilobytes_per_file": size}
    answer["nvjpeg_mib_outside_torch"] = nvjpeg_bytes(device, photos) / 2**20
    base = settings(photos, asked.small)
    runs: dict[str, Run] = {}
    for name, changes in {
        "memory": ("data.cache_on_device=yes", "data.max_side=256"),
        "files_cpu": ("data.cache_on_device=no", "data.decode_on_device=no"),
        "files_gpu": ("data.cache_on_device=no", "data.decode_on_device=yes"),
    }.items():
        runs[name] = begun(override(base, *changes), folder / name)
    network = bare(base, device, "default")
    for step in (network, *(steps_of(run, 0)[0] for run in runs.values())):
        for _ in range(12):  # compile
            step()
    answer["seconds_until_ready"] = time.monotonic() - began
    found = race(runs, network, [every[:count] for count in counts], asked, began)
    answer["rounds"] = len(found[0]["network"])
    for count, results in zip(counts, found, strict=True):
        part = answer[f"{count} cores"] = summary(results, base.train.batch_size)
        set_cores(every[:count])
        part["loader_images_per_second"] = loader_rates(photos, device, asked.small)
    for run in runs.values():
        run.close()
    if asked.lightly and find_spec("lightly"):
        for count in counts:
            part = answer[f"{count} cores"]
            set_cores(every[:count])  # its processes inherit them
            part |= lightly(photos, part["images_per_second"])
    set_cores(every)
    return answer


def race(
    runs: dict[str, Run],
    network: Callable[[], None],
    core_sets: list[list[int]],
    asked: argparse.Namespace,
    began: float,
) -> list[dict[str, list[dict[str, float]]]]:
    """Return the blocks of each contestant for each set of cores, timed in turn."""
    contestants = [(name, run, 0) for name, run in runs.items()]
    contestants += [(f"files_gpu, {n} threads", runs["files_gpu"], n) for n in asked.threads]
    found: list[dict[str, list[dict[str, float]]]] = [
        {name: [] for name in ("network", *(name for name, _, _ in contestants))} for _ in core_sets
    ]
    for _ in range(asked.rounds):
        for cores, results in zip(core_sets, found, strict=True):
            set_cores(cores)
            results["network"].append(block(None, network))
            for name, run, threads in contestants:
                step, close = steps_of(run, threads)
                results[name].append(block(run, step))
                close()
        print(json.dumps({"so_far": found}), file=sys.stderr, flush=True)
        if time.monotonic() - began > asked.seconds:
            break
    return found


def settings(photos: Path, small: bool) -> Config:
    """Return the recipe; `small` is for a machine without a GPU."""
    changes = [f"data.source={photos}", "train.epochs=100000", "train.log_every=10"]
    changes += ["train.tensorboard=false", "train.save_every=1000", "train.batch_size=256"]
    if small:
        changes += [*SMALL, "views.size=32", "train.batch_size=16"]
    return override(recipes.get("c-simclr/imagenet-r50-300").config, *changes)


def nvjpeg_bytes(device: torch.device, photos: Path) -> int:
    """Return what nvJPEG allocates on the device for a batch of 256 files."""
    synchronize()
    torch.zeros(1, device=device)
    before = outside_torch()
    source = open_source(photos)
    decoder = device_decoder(device)
    with Streaming(source, side=512, device=device, decoder=decoder) as loader:
        exhaust(loader.batches(plan(len(source), min(256, len(source)), 1)))
    synchronize()
    return outside_torch() - before


def summary(results: dict[str, list[dict[str, float]]], batch: int) -> dict[str, Any]:
    """Return medians over rounds, and ratios to the network as medians of ratios per round."""
    medians = {
        key: {
            name: statistics.median(each[key] for each in blocks)
            for name, blocks in results.items()
        }
        for key in ("ms", "wait", "peak_gib")
    }
    ratios = {}
    for name, blocks in results.items():
        pairs = zip(blocks, results["network"], strict=True)
        ratios[f"{name} / network"] = statistics.median(a["ms"] / b["ms"] for a, b in pairs)
    peaks = medians["peak_gib"]
    return {
        **medians,
        "images_per_second": {name: 1e3 * batch / ms for name, ms in medians["ms"].items()},
        "ratios": ratios,
        "gpu_minus_cpu_peak_mib": 1024 * (peaks["files_gpu"] - peaks["files_cpu"]),
    }


def loader_rates(photos: Path, device: torch.device, small: bool) -> dict[str, float]:
    """Return images per second of the loaders alone."""
    source, found = open_source(photos), {}
    for name, decoder in (("cpu", None), ("gpu", device_decoder(device))):
        with Streaming(source, side=512, device=device, decoder=decoder) as loader:

            def one_pass(times: int, loader: Streaming = loader) -> None:
                exhaust(loader.batches(plan(len(source), 16 if small else 256, times)))

            one_pass(1)
            count, kind = 2 * len(source), device.type
            found[name] = rate(count, kind, lambda one_pass=one_pass: one_pass(2))
    return found


def lightly(photos: Path, ours: dict[str, float]) -> dict[str, Any]:
    """Return images per second of lightly in a process of its own, and our ratio to it."""
    words = [sys.executable, str(Path(__file__).parent / "peers.py"), "photos", "--data"]
    words += [str(photos), "--worker", "lightly", "--epochs", "2", "--steps", "10"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {"lightly_failed": done.stderr[-500:]}
    found = json.loads(done.stdout.splitlines()[-1])["images/s"]
    ratios = {f"{name} / lightly": ours[name] / found for name in ("files_cpu", "files_gpu")}
    return {"lightly_images_per_second": found, "lightly_ratios": ratios}


def training(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with the pixels of both decoders; return accuracies on held-out labels."""
    photos = folder / "photos"
    images, labels = pictures(600 if asked.small else 6000)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        part = photos / CLASSES[label]
        part.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.transpose(1, 2, 0))
        picture.save(part / f"{i:04}.jpg", quality=90, subsampling="4:2:0")
    base = override(
        recipes.get("c-simclr/cifar10-r18-200").config,
        *(f"data.source={photos}", "data.cache_on_device=yes", "train.tensorboard=false"),
        *(f"train.epochs={asked.epochs}", f"probe.every_epochs={asked.epochs}"),
    )
    if asked.small:
        base = override(base, *SMALL, "train.batch_size=64")
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(asked.seeds):
        for name, setting in (("cpu", "no"), ("gpu", "yes")):
            config = override(base, f"seed={seed}", f"data.decode_on_device={setting}")
            torch.compiler.reset()  # a function is compiled for a few models only
            outcome = pretrain(config, folder / f"{name}-{seed}", display=Display(quiet=True))
            part = found.setdefault(name, {"knn": [], "probe": []})
            if outcome.accuracy is not None:
                part["knn"].append(100 * outcome.accuracy.neighbors)
                part["probe"].append(100 * outcome.accuracy.probe)
            print(json.dumps({"so_far": found}), file=sys.stderr, flush=True)
    means = {
        metric: statistics.mean(np.subtract(found["gpu"][metric], found["cpu"][metric]).tolist())
        for metric in ("knn", "probe")
        if found["gpu"][metric]
    }
    return {"percent": found, "gpu_minus_cpu": means, "epochs": asked.epochs}


def photographs(subsampling: str) -> Iterator[bytes]:
    """Yield JPEG files of noise with the spectrum of photographs."""
    rng = np.random.default_rng(0)
    light, *tints = (noise(1024, slope, rng) for slope in (1.0, 1.5, 1.5, 1.5))
    planes = [128 + 34 * light + 20 * tint for tint in tints]
    large = np.stack(planes, -1).clip(0, 255).astype(np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "photo.jpg"
        for height, width in ((HEIGHT, WIDTH), (333, 499), (64, 64), (33, 47)):
            for _ in range(8):
                top, left = rng.integers(0, (1024 - height, 1024 - width))
                picture = Image.fromarray(large[top : top + height, left : left + width])
                if subsampling == "gray":
                    picture.convert("L").save(path, quality=90)
                else:
                    picture.save(path, quality=90, subsampling=":".join(subsampling))
                yield path.read_bytes()


def pixels(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return largest and mean differences of pixels and of views, of 255."""
    device = pick_device("auto")
    decoder, found = device_decoder(device), {}
    for name in SUBSAMPLINGS:
        files = list(photographs(name))
        encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        apart = [
            (image.cpu().int() - decode(data).int()).abs().float()
            for image, data in zip(decoder.decode(encoded), files, strict=True)
        ]
        values = torch.cat([each.flatten() for each in apart])
        found[name] = {
            "used": name in decoder.subsamplings,
            "largest": values.max().item(),
            "mean": values.mean().item(),
            "share_above_2": (values > 2).float().mean().item(),
            "share_above_8": (values > 8).float().mean().item(),
        }
    photos = folder / "photos"
    photos.mkdir()
    write_photos(str(photos), 64)
    views = []
    for setting in ("no", "yes"):
        config = override(
            settings(photos, True),
            *("data.cache_on_device=no", f"data.decode_on_device={setting}", "views.size=224"),
            *("train.compile=no", "train.precision=float32"),
        )
        run = begun(config, folder / setting)
        views.append(torch.cat(list(run.make_views(some(run.loader, torch.arange(64))))))
        run.close()
    std = torch.tensor([0.229, 0.224, 0.225], device=device)[:, None, None]
    apart = 255 * ((views[0] - views[1]) * std).abs()
    return {"pixels": found, "views": {"largest": float(apart.max()), "mean": float(apart.mean())}}


def main() -> None:
    """Run the chosen measurement and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "training", "pixels"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=170, help="start no round after this")
    parser.add_argument("--threads", type=int, nargs="*", default=[], help="also time nvJPEG with")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lightly", action="store_true", help="also time lightly if installed")
    parser.add_argument("--small", action="store_true", help="a tiny network and few images")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        use_stand_in()
    kinds = {"speed": speed, "training": training, "pixels": pixels}
    with tempfile.TemporaryDirectory() as name:
        found = kinds[asked.what](asked, Path(name))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    about = environment(kind, "torchvision", "torchcodec", "timm", "lightly")
    print(json.dumps({asked.what: found, **about}))


if __name__ == "__main__":
    main()
