"""Everything that the paper measures, on any encoder: suites of tasks, one record per number."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from compressive.corruptions.corrupt import load_frost
from compressive.data.source import Source
from compressive.data.sources import PYTHON, open_source
from compressive.device import pick_device
from compressive.distributed import rank, stop, world_size
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import STAND_IN, open_splits
from compressive.evaluation.features import fingerprint as content_of_weights
from compressive.evaluation.frozen_model import FrozenModel, open_subject
from compressive.evaluation.results import VALUES, Results, read
from compressive.evaluation.tasks import classify, probing
from compressive.evaluation.tasks.gallery import FILE as GALLERY
from compressive.evaluation.tasks.gallery import gallery
from compressive.evaluation.tasks.shifted import robustness, transfer
from compressive.progress import Display
from compressive.rundir.files import EVALUATION, HELD_OUT, RESULTS
from compressive.rundir.folder import command
from compressive.rundir.lock import acquire_lock, ensure_writable

_STANDARD = (
    *("linear", "logistic", "knn", "few-label", "geometry"),
    *("corruptions", "smoothness", "information", "gallery"),
)
_ELSEWHERE = ("transfer", "robustness")  # on sets of their own
SUITES = {
    "quick": ("logistic", "knn", "few-label", "geometry"),
    "standard": _STANDARD,
    "paper": (*_STANDARD, *_ELSEWHERE),
}
TASKS = SUITES["paper"]
Task = Callable[[EvalContext], object]
_SET = ("data", "train_images", "test_images", "classes")  # of the set in `about`
_UNLABELED = ("geometry", "smoothness", "information", "gallery", "transfer")


def evaluate(
    place: str,
    *,
    suite: str = "standard",
    tasks: Sequence[str] = (),
    data: str = "",
    out: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    network: str = "",
    size: int = 0,
    max_images: int = 0,
    epochs: int = 0,
    held_out: bool = False,
    benchmark_root: Path | None = None,
    frost: Path | None = None,
    display: Display | None = None,
    more: Mapping[str, Task] | None = None,
) -> tuple[Results, Path]:
    """Judge an encoder; the results, and the folder that they were written to.

    A task that cannot be done here is left out and listed, and the others go on. What is done is
    written after every task. `more` are tasks of your own, after the suite's or named in `tasks`.
    `held_out` judges by a fifth of the training images and opens no test image: to choose by.
    """
    more = more or {}
    chosen = _chosen(suite, tasks, tuple(more))
    for name, number in {
        "size": size,
        "max-images": max_images,
        "epochs": epochs,
        "seed": seed,
    }.items():
        if not 0 <= number < 2**32:
            raise ValueError(f"--{name} must be 0 or more and below 2**32, got {number}")
    benchmark_root = None if benchmark_root is None else benchmark_root.expanduser()
    if benchmark_root is not None and not benchmark_root.is_dir():
        raise ValueError(f"--benchmark-root {benchmark_root} is not a folder")
    photographs = None if frost is None else load_frost(frost)
    where = pick_device(device, called="--device")
    subject = open_subject(place, where, network=network, size=size)
    splits = open_splits(_place(subject, data), seed=seed, most=max_images, held_out=held_out)
    splits = splits._replace(notes=(*splits.notes, *_seen_before(subject, splits.test)))
    out = out or _default_out(place, HELD_OUT if held_out else EVALUATION)
    ensure_writable(out)
    _require_own(out)
    results = Results(subject.name, seed=seed, command=command())
    display = display or Display(quiet=rank() > 0)
    with _alone(out), display:
        exam = EvalContext(
            subject,
            splits,
            results,
            device=where,
            seed=seed,
            cache=out / "features",
            display=display,
        )
        results.about, results.set, results.of = _about(exam), splits.name, exam.content
        if (out / RESULTS).is_file():
            old = _of_the_same_kind(read(out), out, held_out)
            _begin_with(old, exam, out, chosen, is_own=not data)
        if world_size() > 1:
            # Several processes extract features; the rest is for one.
            for split in ("train", "test"):
                exam.features(split)
            is_first = rank() == 0
            stop()
            if not is_first:
                exam.close()
                return results, out
        runners: dict[str, Callable[[], object]] = {
            "linear": lambda: classify.linear(exam, epochs=epochs),
            "logistic": lambda: classify.logistic_regression(exam),
            "knn": lambda: classify.knn(exam),
            "few-label": lambda: classify.few_label(exam, None if held_out else benchmark_root),
            "geometry": lambda: probing.geometry(exam),
            "corruptions": lambda: probing.corruptions(exam, frost=photographs, epochs=epochs),
            "smoothness": lambda: probing.smoothness(exam),
            "information": lambda: probing.information(exam),
            "gallery": lambda: gallery(exam, out),
            "transfer": lambda: transfer(exam, benchmark_root),
            "robustness": lambda: robustness(exam, benchmark_root, epochs=epochs),
            **{name: partial(task, exam) for name, task in more.items()},
        }
        try:
            for name in chosen:
                _do(name, runners[name], exam)
                if content_of_weights(subject.network) != results.about["weights"]:
                    raise RuntimeError(f"weights or statistics of the network changed in {name}")
                results.write(out)
        finally:
            exam.close()
    return results, out


def _require_own(out: Path) -> None:
    """Refuse a folder that has other things: later commands would take them for results."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    hidden = {name for name in names if name.startswith(".")}  # of a write that was cut short, too
    if RESULTS not in names and names - {"features", VALUES, GALLERY} - hidden:
        raise ValueError(f"{out} is not empty and holds no {RESULTS}; choose another --out")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """The folder is this evaluation's until it ends; of two, each would lose what the other did."""
    held = acquire_lock(out) if rank() == 0 else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _begin_with(
    old: Results, exam: EvalContext, out: Path, chosen: Sequence[str], *, is_own: bool
) -> None:
    """Keep what is there already of the same weights; refuse where it cannot stand beside this.

    And the set that the results are known by, where this is not the encoder's own.
    """
    results = exam.results
    if old.about.get("weights") != results.about["weights"]:
        return
    seen = exam.seen()
    if any(old.about.get(name, words) != words for name, words in seen.items()):
        lost, why = len(old.records), "--size"
    else:
        results.begin_with(old)
        lost, why = len(old.records) - len(results.records), "--max-images, --data or --seed"
    anew = {f"{task} on {exam.splits.name}" for task in chosen}
    for text, place in old.skipped_in.items():
        if place not in anew:
            exam.skip(text, place)
    if not is_own:
        results.about |= {name: old.about[name] for name in _SET if name in old.about}
    if lost:
        raise ValueError(
            f"{out} has {lost} figures of other images or of another size, which would be lost "
            f"({why} differs); give another --out, or delete {out / RESULTS}"
        )


def _of_the_same_kind(old: Results, out: Path, held_out: bool) -> Results:
    """What is there already, if it may stand beside what is asked for."""
    # Older results say it by the name of their set alone.
    was = old.about.get("held_out", str(old.about.get("data", "")).endswith(STAND_IN))
    if was != held_out:
        there, here = ("held-out", "test") if was else ("test", "held-out")
        raise ValueError(
            f"{out} has results of {there} images, and these are of {here} images; choose another "
            "--out"
        )
    return old


def _do(name: str, task: Callable[[], object], exam: EvalContext) -> None:
    exam.task = name
    if exam.splits.held_out and name in _ELSEWHERE:
        exam.skip(f"{name}, which is on test images")
        return
    if exam.classes < 2 and name in TASKS and name not in _UNLABELED:
        exam.skip(
            f"{name}, which needs labels of two classes: {exam.splits.name} has none (--data DATA)"
        )
        return
    exam.display.say(f"{name} ...")
    start = time.perf_counter()
    try:
        task()
    except (ValueError, FileNotFoundError) as problem:
        exam.skip(f"{name}: {problem}")
    exam.display.say(f"{name} took {time.perf_counter() - start:.1f} s")


def _chosen(suite: str, tasks: Sequence[str], more: tuple[str, ...]) -> tuple[str, ...]:
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    known = tuple(dict.fromkeys(TASKS + more))
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ValueError(f"--tasks takes some of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(name for name in known if name in (tasks or SUITES[suite] + more))


def _place(subject: FrozenModel, data: str) -> str:
    if data:
        return data
    if subject.config is None:
        raise ValueError(f"say with --data which images {subject.name} is to be judged by")
    source = subject.config.data.source
    if source.startswith(PYTHON) or (Path(source).is_absolute() and not Path(source).exists()):
        raise ValueError(
            f"{subject.name} was trained on {source}, which is not here; say with --data which "
            "images it is to be judged by"
        )
    return source


def _seen_before(subject: FrozenModel, test: Source) -> Iterator[str]:
    """A note where a run was trained on the very split that it is judged by."""
    data = None if subject.config is None else subject.config.data
    if data is None or data.split == "train" or data.source.startswith(PYTHON):
        return
    with suppress(ValueError, OSError):  # it may be gone, and another set is judged by
        trained = open_source(data.source, data.split)
        if any(trained.origin(i) == test.origin(0) for i in range(len(trained))):
            yield f"the encoder was trained on these test images (data.split={data.split})"


def _default_out(place: str, kind: str) -> Path:
    path = Path(place)
    if path.is_dir():
        return path / kind
    name = path.name
    if path.is_file():  # there may be many of that name
        name += "-" + hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    return Path("runs") / kind / name


def _about(exam: EvalContext) -> dict[str, object]:
    """What the numbers are of."""
    gpu = exam.device.type == "cuda"
    return {
        "encoder": exam.subject.name,
        "weights": content_of_weights(exam.subject.network),
        "held_out": exam.splits.held_out,
        "sha256": exam.subject.sha256,
        **exam.seen(),
        "data": exam.splits.name,
        "train_images": len(exam.source("train")),
        "test_images": len(exam.source("test")),
        "classes": exam.classes,
        "device": torch.cuda.get_device_name(exam.device) if gpu else "cpu",
        "torch": torch.__version__,
    }
