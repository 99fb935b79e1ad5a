"""The quick start: train SimCLR and C-SimCLR on the built-in images and evaluate both."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive import recipes
from compressive.data.loaders import Resident
from compressive.data.prefetch import LABEL
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.evaluation.logistic import PENALTIES, select
from compressive.evaluation.suite import evaluate
from compressive.evaluation.tasks import smoothness
from compressive.metrics import top_k_accuracy
from compressive.progress import Display
from compressive.rundir.folder import open_folder
from compressive.train.loop import Outcome, pretrain

QUICKSTART_METHODS = ("simclr", "c-simclr")
# Tasks that are fast enough on a CPU, and those that the report shows images of.
_TASKS = ("logistic", "knn", "few-label", "geometry", "smoothness", "information", "gallery")
_FASTER_TASKS = {  # 600 of 8,400 images, in nine passes
    "smoothness": partial(smoothness.run, images={"train": 300, "test": 300})
}


class QuickstartRow(NamedTuple):
    """A row of the quick start's table; None where there is no value."""

    name: str
    accuracy: float | None = None  # of logistic regression on the test images
    neighbors: float | None = None
    few_labels: float | None = None  # accuracy with 10 % of the labels
    reducible_residual: float | None = None  # nats
    lipschitz: float | None = None  # mean over eight changes of color
    outcome: Outcome | None = None


def run_quickstart(
    out: Path, *, seed: int = 0, display: Display | None = None
) -> Iterator[QuickstartRow]:
    """Train and evaluate both methods; yield the row of raw pixels, then each when it is known."""
    display = display or Display()
    if pick_device("auto").type == "cpu":
        # The network is so small that a second thread gains a third at best, and costs a factor of
        # 40 if another program uses its core (measured on two cores).
        torch.set_num_threads(1)
    configs = {
        method: replace(recipes.get(f"{method}/quickstart").config, seed=seed)
        for method in QUICKSTART_METHODS
    }
    for method, config in configs.items():  # before the first takes minutes
        open_folder(out / method, config, resume=True)
    yield QuickstartRow("raw pixels", _pixel_accuracy())
    for method, config in configs.items():
        outcome = pretrain(config, out / method, display=display)
        if outcome.step < outcome.total:
            yield QuickstartRow(method, outcome=outcome)
            return
        results, _ = evaluate(
            str(outcome.folder), tasks=_TASKS, seed=seed, display=display, more=_FASTER_TASKS
        )
        records = [each for each in results.records if not each.dataset.endswith(" train")]
        values = {(each.task, each.metric): each.value for each in reversed(records)}
        yield QuickstartRow(
            method,
            accuracy=values.get(("logistic", "top-1")),
            neighbors=values.get(("kNN 20", "top-1")),
            few_labels=values.get(("few labels 10%", "top-1")),
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
