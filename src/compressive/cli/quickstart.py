"""A newcomer's first run: SimCLR and C-SimCLR on the built-in pictures, judged side by side."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from compressive import recipes
from compressive.cli.probes import linear_probe
from compressive.data.loaders import Resident
from compressive.data.prefetch import LABEL
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.evaluation.results import Results
from compressive.evaluation.suite import evaluate
from compressive.evaluation.tasks import smoothness
from compressive.progress import Display
from compressive.train.loop import pretrain
from compressive.train.run import Outcome

METHODS = ("simclr", "c-simclr")
# What there is time for on a CPU, and what a report has pictures of.
TASKS = ("logistic", "knn", "few-label", "geometry", "smoothness", "information", "gallery")
QUICKER = {  # 1,000 of 8,400 images: nine passes for each
    "smoothness": partial(smoothness.run, images={"train": 1000, "test": 1000})
}


class Row(NamedTuple):
    """A line of the table."""

    name: str
    accuracy: float | None  # of logistic regression, on the test pictures; None: interrupted
    neighbors: float | None
    few_labels: float | None  # with a tenth of them
    reducible_residual: float | None  # nats that z keeps of its view alone, above the floor
    outcome: Outcome | None


def quickstart(out: Path, *, seed: int = 0, display: Display | None = None) -> Iterator[Row]:
    """Train and judge both methods, one after the other; each row is there as soon as it is known.

    The first is a linear probe on the raw pixels: what the pictures give away without learning.
    """
    display = display or Display()
    if pick_device("auto").type == "cpu":
        # Its network is so small that a second thread gains a third at best, and loses a factor of
        # 40 where another program keeps it waiting (measured on two cores).
        torch.set_num_threads(1)
    yield Row("raw pixels", _pixels(), None, None, None, None)
    for method in METHODS:
        config = replace(recipes.get(f"{method}/quickstart").config, seed=seed)
        outcome = pretrain(config, out / method, display=display)
        if outcome.step < outcome.total:
            yield Row(method, None, None, None, None, outcome)
            return
        results, _ = evaluate(
            str(outcome.folder), tasks=TASKS, seed=seed, display=display, more=QUICKER
        )
        yield Row(
            method,
            _value(results, "logistic", "top-1"),
            _value(results, "kNN 20", "top-1"),
            _value(results, "few labels 10%", "top-1"),
            _value(results, "information", "reducible_residual"),
            outcome,
        )


def _pixels() -> float:
    """The test accuracy of a linear probe on raw pixels."""
    sets = [_load(split) for split in ("train", "test")]
    labels = [loaded.numbers[LABEL] for loaded in sets]
    flat = [loaded.images.flatten(1).float() / 255 for loaded in sets]
    pixels = list(zip(flat, labels, strict=True))
    # Weaker penalties take longer, and only fit the training pictures better.
    classes = int(labels[0].max()) + 1
    return linear_probe(pixels[0], pixels[1], classes=classes, penalties=(1e4, 1e5))


def _load(split: str) -> Resident:
    source = open_source("builtin", split)
    return Resident(source, side=max(source.image(0).shape), device=pick_device("auto"))


def _value(results: Results, task: str, metric: str) -> float | None:
    found = (r.value for r in results.records if (r.task, r.metric) == (task, metric))
    return next(found, None)
