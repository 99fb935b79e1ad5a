"""The quick start: train SimCLR and C-SimCLR on the built-in images and evaluate both."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.cli.second_process import QUICKSTART_METHODS, quickstart_config
from compressive.config import Config
from compressive.data.batch_buffers import LABEL
from compressive.data.loaders import Resident
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.evaluation.context import EvalContext
from compressive.evaluation.logistic import PENALTIES, select
from compressive.evaluation.results import Results, read
from compressive.evaluation.suite import evaluate
from compressive.evaluation.tasks import (
    corruption,
    few_label,
    gallery,
    geometry,
    information,
    logistic,
    smoothness,
)
from compressive.metrics import top_k_accuracy
from compressive.progress import Display
from compressive.rundir.files import EVALUATION
from compressive.train.loop import pretrain
from compressive.train.outcome import Outcome

# Tasks that are fast enough on a CPU, and those that the report shows images of.
_TASKS = ("logistic", "knn", "few-label", "geometry", "corruptions", "smoothness", "information")
_TASKS += ("gallery",)
CORRUPTED_IMAGES = 120  # of 2,400 test images; each has 70 corruptions
_PENALTIES = PENALTIES[::4]  # 12 instead of 45, from the same range


def _logistic(context: EvalContext) -> None:
    """Run logistic regression, and classify corrupted images by it: it is trained already."""
    found = logistic.run(context, penalties=_PENALTIES)
    if found is not None:
        context.classifier = found.fit.logits
        learned_from = context.images("train", context.features("train").index)
        context.head = {"head": "logistic regression", "chosen": {"l2": found.penalty}}
        context.head |= {"learned_from": learned_from}


_FASTER_TASKS = {
    "logistic": _logistic,
    "corruptions": partial(corruption.run, images=CORRUPTED_IMAGES, extras=False),
    "few-label": partial(few_label.run, penalties=_PENALTIES),
    "geometry": partial(geometry.run, alignment_images=600),
    "information": partial(information.run, images=768),  # three batches
    # 400 of 8,400 images, in nine passes
    "smoothness": partial(smoothness.run, images={"train": 100, "test": 300}),
    "gallery": partial(gallery.run, most=500),  # the time of the map is quadratic in them
}


class QuickstartRow(NamedTuple):
    """A row of the quick start's table; None where there is no value."""

    name: str
    accuracy: float | None = None  # of logistic regression on the test images
    neighbors: float | None = None
    few_labels: float | None = None  # accuracy with 10 % of the labels
    corrupted: float | None = None  # mean accuracy over corruptions of test images
    reducible_residual: float | None = None  # nats
    lipschitz: float | None = None  # mean over eight changes of color
    outcome: Outcome | None = None


def run_quickstart(
    out: Path,
    *,
    seed: int = 0,
    display: Display | None = None,
    process: "subprocess.Popen[bytes] | None" = None,
) -> Iterator[QuickstartRow]:
    """Train and evaluate both methods; yield the row of raw pixels, then one per method.

    process: trains and evaluates the second method at the same time (see `second_process`).
    """
    display = display or Display()
    first, second = QUICKSTART_METHODS
    outcome, results = _trained(quickstart_config(first, seed), out / first, display)
    if results is None:
        yield _quickstart_row(first, outcome, results)
        return
    # It takes seconds, so it comes last: the second method takes longer than the first.
    yield QuickstartRow("raw pixels", _pixel_accuracy())
    yield _quickstart_row(first, outcome, results)
    if process is not None:
        if process.poll() is None:
            display.say(f"waiting for {second}, which runs in another process")
        process.wait()
    # If the process failed, this trains on, and reports the error.
    is_done = process is not None and process.returncode == 0
    config = quickstart_config(second, seed)
    yield _quickstart_row(second, *_trained(config, out / second, display, is_done=is_done))


def _trained(
    config: Config, out: Path, display: Display, *, is_done: bool = False
) -> tuple[Outcome, Results | None]:
    """Train and evaluate a run, or read what another process wrote; None if it was stopped."""
    if pick_device("auto").type == "cpu":
        # The network is so small that a second thread gains a third at best, and costs a factor of
        # 40 if another program uses its core (measured on two cores).
        torch.set_num_threads(1)
    outcome = pretrain(config, out, display=Display(quiet=True) if is_done else display)
    if outcome.step < outcome.total:
        return outcome, None
    if is_done:
        return outcome, read(out / EVALUATION)
    run, seed = str(outcome.folder), config.seed
    results, _ = evaluate(run, tasks=_TASKS, seed=seed, display=display, more=_FASTER_TASKS)
    return outcome, results


def _quickstart_row(method: str, outcome: Outcome, results: Results | None) -> QuickstartRow:
    if results is None:
        return QuickstartRow(method, outcome=outcome)
    records = [each for each in results.records if not each.dataset.endswith(" train")]
    values = {(each.task, each.metric): each.value for each in reversed(records)}
    return QuickstartRow(
        method,
        accuracy=values.get(("logistic", "top-1")),
        neighbors=values.get(("kNN 20", "top-1")),
        few_labels=values.get(("few labels 10%", "top-1")),
        corrupted=values.get(("corruptions", "top-1")),
        reducible_residual=values.get(("information", "reducible_residual")),
        lipschitz=values.get(("smoothness", "lipschitz")),
        outcome=outcome,
    )


def _pixel_accuracy() -> float:
    """Return the test accuracy of a linear probe on raw pixels."""
    sources = [open_source("builtin", name) for name in ("train", "test")]
    side = max(sources[0].image(0).shape)
    splits = [Resident(source, side=side, device=pick_device("auto")) for source in sources]
    labels = [split.numbers[LABEL] for split in splits]
    pixels = [split.images.flatten(1).float() / 255 for split in splits]
    train, test = zip(pixels, labels, strict=True)
    # Weaker penalties take longer and only fit the training images better.
    classes = int(labels[0].max()) + 1
    return linear_probe(train, test, classes=classes, penalties=(1e4, 1e5))


def linear_probe(
    train: tuple[Float[Tensor, "count feat"], Int[Tensor, " count"]],
    test: tuple[Float[Tensor, "asked feat"], Int[Tensor, " asked"]],
    *,
    classes: int,
    penalties: Sequence[float] = PENALTIES[::4],
) -> float:
    """Return the test accuracy of logistic regression on standardized features."""
    # Select the penalty on a random fifth of the training part.
    feats, labels = train
    # Not every fifth image: that could be one class if classes alternate.
    order = torch.randperm(len(feats), generator=torch.Generator().manual_seed(0))
    held = (order % 5 == 0).to(feats.device)
    chosen = select(
        (feats[~held], labels[~held]),
        (feats[held], labels[held]),
        top_k_accuracy,
        classes=classes,
        penalties=penalties,
        standardize=True,
    )
    return float(top_k_accuracy(chosen.fit.logits(test[0]), test[1]))


def _run_in_background() -> None:
    """Train and evaluate the method, folder and seed on the command line."""
    method, out, seed = sys.argv[1:]
    if pick_device("auto").type != "cpu":
        sys.exit(1)  # two methods at a time on one GPU would gain little
    config = quickstart_config(method, int(seed))
    outcome, _ = _trained(config, Path(out) / method, Display(quiet=True))
    sys.exit(0 if outcome.step == outcome.total else 1)


if __name__ == "__main__":
    _run_in_background()
