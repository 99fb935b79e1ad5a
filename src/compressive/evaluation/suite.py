"""Everything that the paper measures, on any encoder: suites of tasks, one record per number."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compressive.corruptions.catalog import load_frost
from compressive.display import Display
from compressive.distributed import rank
from compressive.evaluation import classify, probing
from compressive.evaluation.exam import Exam, open_splits
from compressive.evaluation.features import content_of
from compressive.evaluation.features import fingerprint as content_of_weights
from compressive.evaluation.results import FILE, Results, read
from compressive.evaluation.shifted import robustness, transfer
from compressive.evaluation.subject import Subject, open_subject
from compressive.learner import pick_device

SUITES = {
    "quick": ("logistic", "knn", "few-label", "geometry"),
    "standard": (
        *("linear", "logistic", "knn", "few-label", "geometry"),
        *("corruptions", "smoothness", "information"),
    ),
    "paper": (
        *("linear", "logistic", "knn", "few-label", "geometry"),
        *("corruptions", "smoothness", "information", "transfer", "robustness"),
    ),
}
TASKS = SUITES["paper"]
_UNLABELED = ("geometry", "smoothness", "information", "transfer")


def evaluate(
    place: str,
    *,
    suite: str = "standard",
    only: Sequence[str] = (),
    on: str = "",
    out: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    network: str = "",
    size: int = 0,
    images: int = 0,
    epochs: int = 0,
    sets: Path | None = None,
    frost: Path | None = None,
    display: Display | None = None,
) -> tuple[Results, Path]:
    """Judge an encoder; the results, and the file that they were written to.

    A task that cannot be done here is left out and listed, and the others go on. What is done is
    written after every task.
    """
    chosen = _chosen(suite, only)
    photographs = None if frost is None else load_frost(frost)
    where = pick_device(device)
    subject = open_subject(place, where, network=network, size=size)
    splits = open_splits(_place(subject, on), seed=seed, most=images)
    out = out or _default_out(place)
    results = Results(subject.name, seed=seed, command=" ".join(["compressive", *sys.argv[1:]]))
    display = display or Display(quiet=rank() > 0)
    with display:
        exam = Exam(
            subject,
            splits,
            results,
            device=where,
            seed=seed,
            cache=out / "features",
            display=display,
        )
        results.about = _about(exam)
        if (out / FILE).is_file():
            results.begin_with(read(out))
        tasks: dict[str, Callable[[], None]] = {
            "linear": lambda: classify.linear(exam, epochs=epochs),
            "logistic": lambda: classify.logistic_regression(exam),
            "knn": lambda: classify.knn(exam),
            "few-label": lambda: classify.few_label(exam, sets),
            "geometry": lambda: probing.geometry(exam),
            "corruptions": lambda: probing.corruptions(exam, frost=photographs),
            "smoothness": lambda: probing.smoothness(exam),
            "information": lambda: probing.information(exam),
            "transfer": lambda: transfer(exam, sets),
            "robustness": lambda: robustness(exam, sets),
        }
        try:
            for name in chosen:
                _do(name, tasks[name], exam)
                if content_of_weights(subject.network) != results.about["weights"]:
                    raise RuntimeError(f"weights or statistics of the network changed in {name}")
                if rank() == 0:
                    results.write(out)
        finally:
            exam.close()
    return results, out


def _do(name: str, task: Callable[[], None], exam: Exam) -> None:
    if exam.classes < 2 and name not in _UNLABELED:
        exam.skip(f"{name}, which needs labels: {exam.splits.name} has none")
        return
    if name in ("corruptions", "robustness") and exam.classifier is None:
        classify.linear(exam)
    exam.display.say(f"{name} ...")
    task()


def _chosen(suite: str, only: Sequence[str]) -> tuple[str, ...]:
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    unknown = [name for name in only if name not in TASKS]
    if unknown:
        raise ValueError(f"--only takes some of {', '.join(TASKS)}, got {unknown[0]!r}")
    return tuple(name for name in TASKS if name in (only or SUITES[suite]))


def _place(subject: Subject, on: str) -> str:
    if on:
        return on
    if subject.config is None:
        raise ValueError(f"say with --on which images {subject.name} is to be judged by")
    return subject.config.data.source


def _default_out(place: str) -> Path:
    path = Path(place)
    if path.is_dir():
        return path / "evaluation"
    return Path("runs") / "evaluation" / path.stem


def _about(exam: Exam) -> dict[str, object]:
    """What the numbers are of; runs are compared image by image where `images` is the same."""
    test, loader = exam.source("test"), exam.loader("test")
    gpu = exam.device.type == "cuda"
    return {
        "encoder": exam.subject.name,
        "weights": content_of_weights(exam.subject.network),
        "images": content_of(loader, test.origin, len(test)),
        "train images": len(exam.source("train")),
        "test images": len(test),
        "classes": exam.classes,
        "device": torch.cuda.get_device_name(exam.device) if gpu else "cpu",
        "torch": torch.__version__,
    }
