"""A newcomer's first run: SimCLR and C-SimCLR on the built-in pictures, side by side."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive import encoder, folder, recipes
from compressive.data.loaders import Resident
from compressive.data.plan import Portion
from compressive.data.sources import open_source
from compressive.display import Display
from compressive.learner import pick_device
from compressive.online import features
from compressive.probes import linear_probe
from compressive.run import Outcome
from compressive.train import pretrain

METHODS = ("simclr", "c-simclr")


class Row(NamedTuple):
    """A line of the table."""

    name: str
    accuracy: float  # of a linear probe on the test pictures
    residual: float | None  # nats that z keeps of its view alone, at the end of training
    outcome: Outcome | None


def quickstart(out: Path, *, seed: int = 0, display: Display | None = None) -> Iterator[Row]:
    """Train both methods, one after the other; each row is there as soon as it is known.

    The first is a linear probe on the raw pixels: what the pictures give away without learning.
    """
    display = display or Display()
    device = pick_device("auto")
    if device.type == "cpu":
        # Its network is so small that a second thread gains a third at best, and loses a factor of
        # 40 where another program keeps it waiting (measured on two cores).
        torch.set_num_threads(1)
    sets = {split: _load(split, device) for split in ("train", "test")}
    classes = int(sets["train"].numbers[4].max()) + 1
    pixels = [(s.images.flatten(1).float() / 255, _labels(s)) for s in sets.values()]
    # Weaker penalties take longer, and only fit the training pictures better.
    found = linear_probe(*pixels, classes=classes, penalties=(1e4, 1e5))
    yield Row("raw pixels", found, None, None)
    for method in METHODS:
        config = replace(recipes.get(f"{method}/quickstart").config, seed=seed)
        outcome = pretrain(config, out / method, display=display)
        learned = encoder.load(outcome.folder, device)
        train, test = (_features(learned, s) for s in sets.values())
        yield Row(
            method,
            linear_probe(train, test, classes=classes),
            _last(outcome.folder, "residual"),
            outcome,
        )
        if outcome.step < outcome.total:
            return


def _load(split: str, device: torch.device) -> Resident:
    source = open_source("builtin", split)
    return Resident(source, side=max(source.image(0).shape), device=device)


def _labels(loaded: Resident) -> Int[Tensor, " count"]:
    return loaded.numbers[4]


def _features(
    learned: encoder.Encoder, loaded: Resident
) -> tuple[Float[Tensor, "count feat"], Int[Tensor, " count"]]:
    places = torch.arange(len(loaded.images)).split(256)
    batches = loaded.batches(Portion(some, torch.zeros_like(some)) for some in places)
    feats, index = features(learned, batches, learned.size, torch.float32)
    return feats, _labels(loaded)[index]


def _last(run: Path, name: str) -> float | None:
    """The last value of a reading in a run's journal."""
    lines = (run / folder.JOURNAL).read_text().splitlines()
    values = [json.loads(line).get(name) for line in lines]
    return next((value for value in reversed(values) if value is not None), None)
