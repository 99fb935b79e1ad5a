"""Time whole training steps against the bare network, and the start up to the first step.

    python benchmarks/step.py cifar      # ResNet-18, 32 pixels, 512 images; the four methods
    python benchmarks/step.py imagenet   # ResNet-50, 224 pixels, 256 images; resident, and files
    python benchmarks/step.py start      # seconds to the first step, empty compiler caches

Prints one JSON line. `network` is the compiled backbone alone, forward and backward, over the same
number of views in bfloat16. `network_graph` is the same as a CUDA graph. A step is that of
`pretrain`: batch, views, forward, backward, optimizer, target, metrics. Each time is the median
over rounds of the mean wall-clock time of some steps; contestants are timed in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from loader import write_photos
from timing import environment

from compressive import networks, recipes
from compressive.config import Config, override
from compressive.progress import Display
from compressive.train.log import log
from compressive.train.loop import train_step
from compressive.train.run import Run

METHODS = ("simclr", "c-simclr", "byol", "c-byol")


def begun(config: Config, folder: Path) -> Run:
    """Return a run that is ready for its first step."""
    run = Run(config, folder, Display(quiet=True), resume=False)
    run.restore()
    return run


def stepper(run: Run) -> Callable[[], None]:
    """Return a function that makes the next step of a run as `train` does, including logging."""
    batches = run.batches()

    def step() -> None:
        found = train_step(run, batches)
        if run.schedule.is_time_to_log(run.step):
            log(run, found)

    return step


def bare(config: Config, device: torch.device, mode: str) -> Callable[[], None]:
    """Return a function that runs the backbone alone on the views of a batch."""
    network = networks.build(config.network, config.views.size).to(device)
    network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    compiled = torch.compile(network, dynamic=False, mode=mode)
    size, views = config.views.size, 2 * config.train.batch_size
    x = torch.randn(views, 3, size, size, device=device, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            compiled(x).float().square().mean().backward()
        network.zero_grad(set_to_none=True)

    return step


def race(
    contestants: dict[str, Callable[[], None]], *, rounds: int, steps: int
) -> dict[str, float]:
    """Return milliseconds per step, timed in turn; the first steps compile and do not count."""
    for step in contestants.values():
        for _ in range(12):
            step()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - begin) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def cifar(folder: Path, rounds: int) -> dict[str, object]:
    """Time the four methods at the size of CIFAR-10; compared methods are timed in turn."""
    device = torch.device("cuda", 0)

    def method(name: str) -> Callable[[], None]:
        config = override(
            recipes.get(f"{name}/cifar10-r18-200").config,
            *("data.source=builtin", "train.epochs=10000", "train.tensorboard=false"),
            *("probe.every_epochs=10000", "train.save_every=1000", "train.log_every=10"),
        )
        return stepper(begun(config, folder / name))

    config = recipes.get("c-simclr/cifar10-r18-200").config
    networks_alone = {
        "network": bare(config, device, "default"),
        "network_graph": bare(config, device, "reduce-overhead"),
    }
    ms = race(
        {"c-simclr": method("c-simclr"), "simclr": method("simclr"), **networks_alone},
        rounds=rounds,
        steps=97,
    )
    print(json.dumps({"so_far": ms}), file=sys.stderr, flush=True)
    ms |= race({"byol": method("byol"), "c-byol": method("c-byol")}, rounds=rounds, steps=97)
    return {
        "ms": ms,
        "seconds_per_epoch": {name: ms[name] * 50_000 / 512 / 1e3 for name in METHODS},
        "c-simclr / network": ms["c-simclr"] / ms["network"],
        "c-simclr / network_graph": ms["c-simclr"] / ms["network_graph"],
        "c-simclr / simclr": ms["c-simclr"] / ms["simclr"],
        "c-byol / byol": ms["c-byol"] / ms["byol"],
    }


def imagenet(folder: Path, rounds: int) -> dict[str, object]:
    """Time ResNet-50 at 224 pixels, from device memory and from files."""
    device = torch.device("cuda", 0)
    photos = folder / "photos"
    photos.mkdir()
    size = write_photos(str(photos), 2048)
    base = override(
        recipes.get("c-simclr/imagenet-r50-300").config,
        *("train.batch_size=256", "train.tensorboard=false", "train.save_every=1000"),
        *(f"data.source={photos}", "train.log_every=10", "train.epochs=10000"),
    )
    resident = override(base, "data.cache_on_device=yes", "data.max_side=256")
    found = {
        "resident": stepper(begun(resident, folder / "resident")),
        "simclr": stepper(begun(override(resident, "method=simclr"), folder / "simclr")),
        "files": stepper(begun(override(base, "data.cache_on_device=no"), folder / "files")),
        "network": bare(base, device, "default"),
    }
    ms = race(found, rounds=rounds, steps=20)
    return {
        "ms": ms,
        "images_per_second": {name: 256e3 / value for name, value in ms.items()},
        "kilobytes_per_file": size,
        "resident / network": ms["resident"] / ms["network"],
        "files / network": ms["files"] / ms["network"],
        "c-simclr / simclr": ms["resident"] / ms["simclr"],
    }


def start(folder: Path) -> dict[str, object]:
    """Return the seconds from the start of Python to the end of the first step."""
    photos = folder / "photos"
    photos.mkdir()
    write_photos(str(photos), 512)
    runs = {
        "c-simclr, resnet18": ("c-simclr/cifar10-r18-200", "builtin", ()),
        "c-simclr, resnet50": ("c-simclr/imagenet-r50-300", str(photos), ("train.batch_size=256",)),
    }
    seconds = {}
    for number, (name, (recipe, source, changes)) in enumerate(runs.items()):
        out = folder / str(number)
        caches = {n: str(out / n) for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        given = ["--set", "train.save_every=1000", "--set", "train.tensorboard=false"]
        for change in changes:
            given += ["--set", change]
        words = [sys.executable, __file__, "first", source, "--recipe", recipe, *given]
        begin = time.time()
        done = subprocess.run(
            words, env={**os.environ, **caches}, capture_output=True, text=True, check=True
        )
        seconds[name] = float(done.stdout.splitlines()[-1]) - begin
    return {"seconds_to_the_first_step": seconds}


def first(arguments: list[str]) -> None:
    """Make one step and print the current time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--recipe")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args(arguments)
    config = override(recipes.get(given.recipe).config, f"data.source={given.source}", *given.set)
    with tempfile.TemporaryDirectory() as folder:
        stepper(begun(config, Path(folder) / "run"))()
        torch.cuda.synchronize()
        print(time.time())


def main() -> None:
    """Run the chosen benchmark and print one JSON line."""
    if sys.argv[1:2] == ["first"]:
        return first(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cifar", "imagenet", "start"))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "start":
            found = start(folder)
        else:
            found = (cifar if given.what == "cifar" else imagenet)(folder, given.rounds)
    print(json.dumps({given.what: found, **environment("cuda", "torchvision", "timm")}))
    return None


if __name__ == "__main__":
    main()
