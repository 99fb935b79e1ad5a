"""Digests of everything the library computes, to verify that a change alters no value.

    python tests/digests.py --write before.json               # with the old code
    python tests/digests.py --write before.json --quickstart  # takes minutes; adds to the file
    python tests/digests.py --check before.json               # with the new code
    python tests/digests.py --check before.json --quickstart

It trains all methods and many variants for 20 steps on the CPU and evaluates some of them. With
--quickstart it runs the quick start instead, as the command line does. Weights, optimizer states,
metrics, figures and values per image must be bitwise equal. This holds only on one machine with
one set of versions; the file records them all.

Names do not matter: tensors are hashed without their names and in any order, and renamed metrics
are mapped by `RENAMED`. Names of the library occur only in the first block.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from compressive.config import Config, override  # override(Config(), "section.name=value", ...)
from compressive.corruptions import EXTRAS, NAMES
from compressive.corruptions.corrupt import corrupt
from compressive.evaluation.suite import evaluate
from compressive.methods import build
from compressive.progress import Display  # progress(title, done, total, readings)

# Names of the library -----------------------------------------------------------------------------
from compressive.rundir.checkpoint import (
    latest,  # checkpoint folder -> path and state of the last checkpoint
)
from compressive.train import pretrain

QUICKSTART = ("-m", "compressive", "quickstart", "--out")
QUICKSTART_METHODS = ("simclr", "c-simclr")  # names of its run folders
CHECKPOINTS, METRICS, ENCODER = "checkpoints", "metrics.jsonl", "encoder.safetensors"
EVALUATION, RESULTS = "evaluation", "results.json"
VALUES, GALLERY = "values.safetensors", "gallery.safetensors"
RECORD_NAME, RECORD_VALUES = ("task", "dataset", "metric"), ("value", "low", "high", "n")
PROTOCOL = "protocol"  # key of a record
CORRUPTION = "corruption"  # a record with this in its task goes to a separate section

# Parts of a checkpoint that hold tensors: our name and the library's.
PARTS = {
    "weights": "learner",
    "optimizer": "optimizer",
    "probe's optimizer": "probe_optimizer",
    "controller": "controller",
}
CLOCK = ("images_per_second", "data_wait_fraction")  # metrics that differ in every run

# Old name -> new name of metrics, and of tasks, datasets and metrics of records.
RENAMED = {
    "movable": "reducible_residual",
    "agreement": "positive_cosine",
    "participation": "participation_ratio",
    "spread": "embedding_std",
}
# Runs with TensorFlow's running variance, which is an argument of `build`, not a setting.
BIASED = ("network of the paper",)

STOP, STEPS = 10, 20  # step at which a resumed run is interrupted, and its last step
# Disable the collapse check, which such a small network would fail.
TINY = (
    *("data.limit=64", "views.size=32", "network.name=test_resnet", "network.hidden_dim=16"),
    *(
        "network.projection_dim=16",
        "optim.name=sgd",
        "optim.warmup_epochs=0.5",
        f"train.steps={STEPS}",
    ),
    *("train.batch_size=8", "train.device=cpu", "train.compile=no", "train.log_every=1"),
    *("train.tensorboard=false", "probe.every_epochs=1"),
    *("health.min_participation_ratio=0", "health.collapse_std=0"),
)
METHODS = ("simclr", "c-simclr", "byol", "c-byol", "moco-v3", "c-moco-v3", "simsiam", "c-simsiam")
VARIANTS: dict[str, tuple[str, ...]] = {
    "linear beta": ("method=c-simclr", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=1"),
    "cosine beta": ("method=c-simclr", "bottleneck.schedule=cosine"),
    "adaptive beta": ("method=c-simclr", "bottleneck.schedule=adaptive"),
    "adaptive beta, c-byol": (
        *("method=c-byol", "bottleneck.schedule=adaptive", "bottleneck.adaptive_weight=rank"),
    ),
    "target, c-simclr": ("method=c-simclr", "bottleneck.target_residual=0.5"),
    "target, c-byol": ("method=c-byol", "bottleneck.target_residual=0.5"),
    "accumulated, byol": ("method=byol", "train.grad_accum_steps=2"),
    "accumulated, c-byol": ("method=c-byol", "train.grad_accum_steps=2"),
    "closed, c-simclr": ("method=c-simclr", "bottleneck.residual_estimator=analytic"),
    "closed, c-byol": ("method=c-byol", "bottleneck.residual_estimator=analytic"),
    "no sample, c-simclr": ("method=c-simclr", "bottleneck.stochastic=false"),
    "no sample, c-byol": ("method=c-byol", "bottleneck.stochastic=false"),
    "b sees other": ("method=c-byol", "bottleneck.backward_view=other"),
    "lars, c-simclr": ("method=c-simclr", "optim.name=lars", "optim.lr=2"),
    "lars, c-byol": ("method=c-byol", "optim.name=lars", "optim.weight_decay=0.001"),
    "adamw": ("method=c-simclr", "optim.name=adamw", "optim.lr=0.03", "optim.weight_decay=0.01"),
    "sgd with decay": ("method=simclr", "optim.weight_decay=0.01", "optim.momentum=0.5"),
    "views of SimCLR": ("method=simclr", "views.policy=simclr", "views.strength=0.5"),
}
# 8 steps on 48 files, which are created faster than the built-in images.
SHORT: dict[str, tuple[str, ...]] = {
    "files": ("method=c-simclr",),
    "files, streamed": (
        "method=c-simclr",
        "data.cache_on_device=no",
        "data.workers=1",
        "data.max_side=40",
    ),
    "target, accumulated": (
        "method=c-byol",
        "bottleneck.target_residual=0.5",
        "train.grad_accum_steps=2",
    ),
    "closed, c-moco-v3": ("method=c-moco-v3", "bottleneck.residual_estimator=analytic"),
    "b sees other, c-simsiam": ("method=c-simsiam", "bottleneck.backward_view=other"),
    "sharper": ("method=c-simclr", "bottleneck.kappa_e=16384", "bottleneck.kappa_b=5"),
    "cheaper": ("method=c-byol", "decoder.kappa_d=10", "bottleneck.beta=0.01"),
    "other negatives": ("method=c-simclr", "decoder.same_view_negatives=false"),
    "target as the network": ("method=byol", "target.independent=false", "target.ema_decay=0.9"),
    "views otherwise": (
        *("method=simclr", "views.blur=false", "views.antialias=true", "views.crop_scale_min=0.3"),
    ),
    "bf16": ("method=c-simclr", "train.precision=bf16"),
    "seed 1": ("method=c-byol", "seed=1"),
    "epochs": ("method=simclr", "train.steps=0", "train.epochs=1"),
    "network of the paper": (
        *("method=c-byol", "train.steps=3", "network.name=resnet18", "network.variant=official"),
        *("network.zero_init_last=false", "network.head_layers=3", "network.head_last_norm=true"),
    ),
    "small stem": (
        *("method=simclr", "train.steps=3", "network.name=resnet18", "network.stem=cifar"),
        "views.size=16",
    ),
}
RESUMED = {"resumed, c-simclr": ("method=c-simclr",), "resumed, lars": VARIANTS["lars, c-byol"]}
TOGETHER = {
    "two processes, c-simclr": ("method=c-simclr",),
    "two processes, c-byol": ("method=c-byol",),
    "two processes, c-moco-v3": ("method=c-moco-v3", "train.steps=5"),
    "two processes, accumulated": ("method=c-byol", "train.grad_accum_steps=2", "train.steps=5"),
}
# Long enough to learn a little: metrics of random features would not show differences.
LONG: dict[str, tuple[str, ...]] = {
    "judged": (
        *("method=c-simclr", "bottleneck.beta=0.1", "train.steps=60", "train.batch_size=64"),
        *(
            "data.limit=3000",
            "views.crop_scale_min=0.5",
            "views.blur=false",
            "network.hidden_dim=128",
        ),
        *(
            "network.projection_dim=64",
            "optim.name=adamw",
            "optim.lr=0.032",
            "optim.weight_decay=0.01",
        ),
        "train.log_every=10",
    ),
}
# Name -> the trained run and the arguments of `evaluate`.
_UNLABELED = ("geometry", "smoothness", "information")
_STANDARD = ("linear", "logistic", "knn", "few-label", *_UNLABELED, "gallery")
EVALUATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("judged", {"tasks": _STANDARD, "max_images": 300, "epochs": 4}),
    "bootstrap": ("c-byol", {"tasks": ("knn", *_UNLABELED), "max_images": 220}),
    "held out": ("judged", {"tasks": ("logistic", "knn"), "max_images": 300, "held_out": True}),
    "few labels": ("judged", {"tasks": ("few-label",), "max_images": 1500}),
    "not compressed": ("simclr", {"tasks": ("geometry", "information"), "max_images": 100}),
    "corruptions": ("judged", {"tasks": ("corruptions",), "max_images": 150, "epochs": 4}),
}
PIXELS = (32, 64, 112)  # sides of images to corrupt, one for each parameter table
# --------------------------------------------------------------------------------------------------

Json = dict[str, Any]


def config_of(*changes: str) -> Config:
    """Return the settings of a tiny run with these changes."""
    return override(Config(), *TINY, *changes)


# Hashes


def short_hash(*parts: bytes) -> str:
    """Return a digest of bytes, with parts delimited."""
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and content, without strides and device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    return short_hash(about.encode(), flat.numpy().tobytes())


def digest_of(hashes: Mapping[str, str]) -> str:
    """Return a combined digest that does not depend on names and order."""
    return short_hash(*(each.encode() for each in sorted(hashes.values())))


def leaves(state: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested containers with its path."""
    if isinstance(state, dict):
        pairs = list(state.items())
    elif isinstance(state, list | tuple):
        pairs = list(enumerate(state))
    else:
        yield place, state
        return
    for key, value in pairs:
        yield from leaves(value, f"{place}.{key}" if place else str(key))


def tensors_of(state: Any) -> Json:
    """Return a digest of all tensors in a state, and one of each tensor by name."""
    each = {name: tensor_hash(leaf) for name, leaf in leaves(state) if isinstance(leaf, Tensor)}
    return {"digest": digest_of(each), "tensors": each}


def numbers_hash(content: Any) -> str | None:
    """Return a digest of the numbers in JSON in any order, or None if there are none."""
    numbers = [leaf for _, leaf in leaves(content) if is_number(leaf)]
    return short_hash(*sorted(repr(float(n)).encode() for n in numbers)) if numbers else None


def is_number(value: Any) -> bool:
    """Return whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# Training


class Stopping(Display):
    """Request a stop of its run at a step, as Ctrl-C would."""

    def progress(self, title: str, done: float, total: float, *more: Any, **named: Any) -> None:
        if (done, total) == (STOP, STEPS):
            os.kill(os.getpid(), signal.SIGTERM)


def digests_of_run(folder: Path) -> Json:
    """Return digests of a run: the parts of its last checkpoint, its encoder and its metrics."""
    found = latest(folder / CHECKPOINTS)
    assert found is not None, f"no checkpoint in {folder}"
    state = found[1]
    parts = {ours: tensors_of(state[key]) for ours, key in PARTS.items() if key in state}
    parts["encoder"] = tensors_of(load_file(folder / ENCODER))
    return {"parts": parts, "readings": readings(folder / METRICS)}


def readings(path: Path) -> Json:
    """Return for each metric a digest over all steps and the last value."""
    series: dict[str, list[str]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "step" not in line:  # the header
            continue
        for name, value in line.items():
            if name not in CLOCK and (value is None or is_number(value)):
                series.setdefault(name, []).append(f"{line['step']} {value!r}")
    return {
        name: {"digest": short_hash(*(word.encode() for word in words)), "last": words[-1]}
        for name, words in series.items()
    }


def make_photos(folder: Path) -> Path:
    """Write 48 images of several sizes to 4 class folders, half of them as JPEG."""
    random = np.random.default_rng(0)
    for number in range(48):
        height, width = (int(side) for side in random.integers(24, 80, 2))
        coarse = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        path = folder / f"class{number % 4}" / f"{number}.{'png' if number % 8 < 4 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder


def train_together(rank: int, folder: str) -> None:
    """Train all of `TOGETHER` in one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    for name, changes in TOGETHER.items():
        pretrain(config_of(*changes), Path(folder) / name, display=Display(quiet=True))
    dist.destroy_process_group()


class Runs:
    """Runs in a folder, each trained on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alone = {f"{name}": (f"method={name}",) for name in METHODS} | VARIANTS
        short = (f"data.source={folder / 'photos'}", "data.limit=0", "train.steps=8")
        self.alone |= {name: (*short, *changes) for name, changes in SHORT.items()} | LONG

    @property
    def names(self) -> list[str]:
        """Return the names of all runs."""
        return [*self.alone, *RESUMED, *TOGETHER]

    def run(self, name: str) -> Path:
        """Return the folder of a finished run."""
        path = self.folder / name
        if path.is_dir():
            return path
        if name in TOGETHER:
            # Fork from a process that has imported everything: imports take longer than training.
            modules = [each.__module__ for each in (pretrain, evaluate)]
            multiprocessing.set_forkserver_preload(["torch.distributed", *modules])
            arguments = (str(self.folder),)
            mp.start_processes(train_together, arguments, nprocs=2, start_method="forkserver")
        elif name in RESUMED:
            config = config_of(*RESUMED[name])
            outcome = pretrain(config, path, display=Stopping(quiet=True))
            assert outcome.step == STOP, f"{name} was to stop at {STOP}, got {outcome.step}"
            pretrain(config, path, display=Display(quiet=True))
        else:
            if name in SHORT and not (self.folder / "photos").is_dir():
                make_photos(self.folder / "photos")
            config = config_of(*self.alone[name])
            # Evaluation needs the heads and can only rebuild them with `build` itself.
            method = partial(build, biased_variance=True) if name in BIASED else build
            pretrain(config, path, display=Display(quiet=True), method=method)
        return path


# Evaluation


def records_of(folder: Path) -> Json:
    """Return every metric of an evaluation: numbers as text, and digests of their values."""
    values = load_file(folder / VALUES)
    found: Json = {}
    for record in json.loads((folder / RESULTS).read_text())["records"]:
        key = " | ".join(record[name] for name in RECORD_NAME)
        behind = values.get("/".join(record[name] for name in RECORD_NAME))
        protocol = {name: numbers_hash(part) for name, part in record[PROTOCOL].items()}
        found[key] = {
            "numbers": {name: repr(record[name]) for name in RECORD_VALUES},
            "each image": None if behind is None else tensor_hash(behind),
            "protocol": {name: each for name, each in protocol.items() if each is not None},
        }
    return found


def digests_of_evaluation(folder: Path) -> Json:
    """Return metrics, and the images and the map if there are any."""
    found: Json = {"records": records_of(folder)}
    if (folder / GALLERY).is_file():
        found["parts"] = {"gallery": tensors_of(load_file(folder / GALLERY))}
    return found


def corrupted_pixels(side: int) -> Json:
    """Return digests of four images of this side under every corruption."""
    random = np.random.default_rng(side)
    coarse = random.integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    smooth = [
        Image.fromarray(each).resize((side, side), Image.Resampling.BICUBIC) for each in coarse
    ]
    images = torch.from_numpy(np.stack([np.asarray(each) for each in smooth])).permute(0, 3, 1, 2)
    photos = random.integers(0, 256, (6, 3, 300, 400), dtype=np.uint8)
    named: Json = {"index": torch.arange(4), "frost": list(torch.from_numpy(photos))}
    return {
        "parts": {
            name: tensors_of({str(s): corrupt(images, name, s, **named) for s in range(1, 6)})
            for name in (*NAMES, *EXTRAS)
        }
    }


def quickstart(folder: Path) -> Json:
    """Run the command with its default seed and return the table, both runs and their metrics."""
    command = [sys.executable, *QUICKSTART, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    cells = " ".join(re.findall(r"\d+\.\d+", "".join(rows)))
    found: Json = {"table": {"numbers": {"cells": cells}}}
    for method in QUICKSTART_METHODS:
        run = folder / method
        judged = digests_of_evaluation(run / EVALUATION)
        trained = digests_of_run(run)
        found[method] = trained | judged | {"parts": trained["parts"] | judged.get("parts", {})}
    return found


# Sections of the file


def compute(folder: Path, only: str) -> Json:
    """Compute training, evaluation and corruptions: all cases with this text in their names."""
    runs = Runs(folder / "runs")
    found: Json = {"training": {}, "evaluation": {}, "corruptions": {}}
    for name in (name for name in runs.names if only in name):
        found["training"][name] = timed(name, lambda name=name: digests_of_run(runs.run(name)))
    for name, (run, arguments) in EVALUATIONS.items():
        if only not in name:
            continue
        out = folder / "evaluations" / name
        place = str(runs.run(run))
        options = {**arguments, "out": out, "device": "cpu", "display": Display(quiet=True)}
        timed(f"evaluation of {name}", lambda place=place, o=options: evaluate(place, **o))
        judged = digests_of_evaluation(out)
        records = judged.pop("records")
        corrupted = [key for key in records if CORRUPTION in key.partition(" | ")[0]]
        if corrupted:
            found["corruptions"][name] = {"records": {key: records[key] for key in corrupted}}
        rest = {key: record for key, record in records.items() if key not in corrupted}
        found["evaluation"][name] = {"records": rest} | judged
    for side in PIXELS:
        if only in (name := f"corrupted pixels, {side}"):
            found["corruptions"][name] = timed(name, lambda side=side: corrupted_pixels(side))
    return found


def timed(name: str, work: Callable[[], Any]) -> Any:
    """Return the result of the work; print its wall time and the CPU time of this process."""
    start, busy = time.perf_counter(), _busy()
    found = work()
    print(f"{time.perf_counter() - start:6.1f} s  {_busy() - busy:6.1f} s  {name}", flush=True)
    return found


def _busy() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def machine() -> Json:
    """Return everything besides the code that the bits depend on."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.is_file() else ""
    model = re.search(r"model name\s*: (.*)", text)
    return {
        "cpu": model[1] if model else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: version(name) for name in ("torchvision", "timm", "numpy", "pillow")},
    }


# Comparison


def differences(old: Json, new: Json) -> list[str]:
    """Describe how a case differs from before."""
    if not new:
        return ["it is not there"]
    found = []
    for part, before in old.get("parts", {}).items():
        found += _tensors_apart(part, before, new.get("parts", {}).get(part))
    for name, before in old.get("readings", {}).items():
        _, now = look_up(new["readings"], (name,))
        if now is None:
            found.append(f"reading {name}: not there{_alike(before, new['readings'])}")
        elif now["digest"] != before["digest"]:
            found.append(f"reading {name}: last {before['last']}, now {now['last']}")
    for key, before in old.get("records", {}).items():
        _, now = look_up(new["records"], tuple(key.split(" | ")))
        found += _record_apart(key, before, now, new["records"])
    if old.get("numbers") != new.get("numbers"):
        found.append(f"{old['numbers']}, now {new['numbers']}")
    return found


def look_up(content: Json, name: tuple[str, ...]) -> tuple[str, Any]:
    """Return an entry by its old name, any part of which may be renamed, or None."""
    options = [dict.fromkeys((RENAMED.get(part, part), part)) for part in name]
    for parts in itertools.product(*options):
        if (key := " | ".join(parts)) in content:
            return key, content[key]
    return "", None


def _tensors_apart(part: str, old: Json, new: Json | None) -> list[str]:
    if new is None:
        return [f"{part}: not there"]
    if old["digest"] == new["digest"]:
        return []
    before, now = Counter(old["tensors"].values()), Counter(new["tensors"].values())
    lost, come = before - now, now - before
    were = [name for name, each in old["tensors"].items() if each in lost]
    are = [name for name, each in new["tensors"].items() if each in come]
    return [
        f"{part}: {lost.total()} of {before.total()} tensors are not as they were, "
        f"such as {', '.join(were[:3]) or 'none'}; new: {', '.join(are[:3]) or 'none'}"
    ]


def _record_apart(key: str, old: Json, new: Json | None, every: Json) -> list[str]:
    if new is None:
        return [f"{key}: not there{_alike(old, every)}"]
    found = []
    if old["numbers"] != new["numbers"]:
        found.append(f"{key}: {old['numbers']}, now {new['numbers']}")
    if old["each image"] != new["each image"]:
        found.append(f"{key}: values of images are others")
    lost = Counter(old["protocol"].values()) - Counter(new["protocol"].values())
    if names := [name for name, each in old["protocol"].items() if each in lost]:
        found.append(f"{key}: other numbers in its protocol: {', '.join(names)}")
    return found


def _alike(old: Json, every: Json) -> str:
    """Return entries with equal content: something may have been renamed."""
    same = [name for name, each in every.items() if each == old]
    return f"; the same numbers have {', '.join(same[:3])}: is it in RENAMED?" if same else ""


def check(old: Json, new: Json, only: str, ignored: list[str]) -> bool:
    """Print differences; return whether there are none in the sections that are not ignored."""
    is_same = True
    for name, now in machine().items():
        if old["machine"][name] != now:
            print(f"not the same {name}: {old['machine'][name]}, now {now}; bits may differ")
    for section, cases in new.items():
        if section not in old:
            print(f"{section}: not in the file")
            is_same = False
            continue
        before = {name: case for name, case in old[section].items() if only in name}
        apart = {name: differences(case, cases.get(name, {})) for name, case in before.items()}
        apart = {name: words for name, words in apart.items() if words}
        note = " (ignored)" if section in ignored else ""
        print(f"{section}: {len(before) - len(apart)} of {len(before)} cases are equal{note}")
        for name, words in apart.items():
            more = [f"... and {len(words) - 25} more"] if len(words) > 25 else []
            print("\n    ".join([f"  {name}:", *words[:25], *more]))
        is_same &= not apart or section in ignored
    return is_same


def main() -> int:
    """Write the file or check against it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="keep the digests in this file")
    what.add_argument("--check", type=Path, metavar="FILE", help="compare with those of this file")
    parser.add_argument("--quickstart", action="store_true", help="the quick start, and only it")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--ignore", action="append", default=[], help="a section that may differ")
    given = parser.parse_args()
    if given.only and (given.write or given.quickstart):
        parser.error("--only is for --check, and not for the quick start")
    print(f"the library is {sys.modules[pretrain.__module__].__file__}", flush=True)
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.quickstart:
            new = {"quickstart": timed("quick start", lambda: quickstart(folder))}
        else:
            new = compute(folder, given.only)
    if not any(new.values()):
        parser.error(f"no case has {given.only!r} in its name")
    if given.check:
        return 0 if check(json.loads(given.check.read_text()), new, given.only, given.ignore) else 1
    old = json.loads(given.write.read_text()) if given.write.is_file() else {}
    if old.get("machine", machine()) != machine():
        parser.error(f"{given.write} is of another machine or other versions; delete it first")
    given.write.write_text(json.dumps({"machine": machine(), **old, **new}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
