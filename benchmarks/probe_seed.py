"""Measure how much the scores of the linear probe vary with its seed, by learning rate.

    python benchmarks/probe_seed.py ../shared/data/cifar10 --threads 2 --cache /tmp/crops.pt

Extracts features of random crops of some training images with the packaged encoder. This takes most
of the time and is cached in --cache. Then trains the probe with several seeds. A seed draws the
order of the images and which crop of an image is used in which epoch; in a second part it also
draws the held-out images. Prints one JSON line: for each learning rate, and for the chosen rate,
mean and standard deviation over seeds of top-1 and ECE on test images, in percentage points.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment

from compressive.augment.ops import augment
from compressive.augment.params import View
from compressive.data.sampler import BatchIndices, batch_index_stream
from compressive.data.source import subset
from compressive.data.splits import stratified
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.features import forward
from compressive.evaluation.frozen_model import open_model
from compressive.evaluation.results import Results
from compressive.evaluation.tasks.linear import LEARNING_RATES, WIDER, Heads, choose, train_heads
from compressive.metrics import ece, top_k_accuracy
from compressive.rng import image_keys

FORMER = (25.6, 12.8, 6.4, 3.2, 1.6, 0.8, *LEARNING_RATES)  # the grid before 2026-11-17
ENCODER = "cifar10-byol-r18"


def features(data: str, images: int, crops: int, cache: Path) -> None:
    """Write features of train, test (half as many) and crops of train; save after each crop."""
    cpu = torch.device("cpu")
    model, splits = open_model(ENCODER, cpu), open_splits(data, seed=0, most=images)
    splits = splits._replace(test=subset(splits.test, torch.arange(images // 2)))
    context = EvalContext(model, splits, Results("probe"), device=cpu)
    train, test = context.features("train"), context.features("test")
    views = [train.feats]  # the central crop is one of the views
    view = View(jitter=0.0, gray=0.0, blur=0.0, antialias=model.antialias)
    for crop in range(crops + 1):
        done = {"train": train.feats, "labels": train.labels, "crops": torch.stack(views)}
        torch.save(done | {"test": test.feats, "test_labels": test.labels}, cache)
        print(f"{crop} of {crops} crops", file=sys.stderr, flush=True)
        some = train.index.split(500)
        batches = context.loader("train").batches(
            BatchIndices(part, torch.full_like(part, crop))
            for part in (some if crop < crops else ())
        )
        found = []
        for batch in batches:
            keys = image_keys(batch.index, seed=0, epoch=batch.epoch, view=2)
            height, width = batch.height, batch.width
            views_of = augment(batch.images, keys, view, model.size, height=height, width=width)
            x = context.renormalize(views_of)
            found.append(forward(model.network, x, context.dtype))
        views += [torch.cat(found)] if found else []
    context.close()


def trained(
    of: dict[str, Tensor], seed: int, epochs: int, split: int | None = None
) -> tuple[Heads, Tensor]:
    """Train the heads of all rates with a seed, as in `linear.run`; return them and held rows."""
    labels, crops, classes = of["labels"], of["crops"], int(of["labels"].max()) + 1
    fit, held = stratified(labels, 0.1, seed=seed if split is None else split)
    batch = 1024 if len(fit) >= 20_000 else min(256, len(fit))
    steps = epochs * len(fit) // batch
    random = torch.Generator().manual_seed(seed)
    which = torch.rand(len(crops), len(labels), generator=random).argsort(0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        orders = batch_index_stream(len(fit), batch, seed=seed)
        for _, order in zip(range(steps), orders, strict=False):
            rows = fit[order.index]
            yield crops[which[order.epoch % len(crops), rows], rows], labels[rows]

    return train_heads(
        batches(),
        feat=crops.shape[2],
        classes=classes,
        steps=steps,
        learning_rates=[rate * batch / 256 for rate in FORMER],
        device=torch.device("cpu"),
    ), held


def scores(of: dict[str, Tensor], seed: int, epochs: int, split: int | None) -> dict[str, Any]:
    """Return top-1 and ECE on test for each rate and for each chosen rate, by name."""
    heads, held = trained(of, seed, epochs, split)
    truth, there = of["test_labels"], (of["train"][held], of["labels"][held])
    test = [
        (100 * float(top_k_accuracy(x, truth)), 100 * float(ece(x, truth)))
        for x in heads.logits(of["test"])
    ]
    first = len(FORMER) - len(WIDER)
    shipped = Heads(*(part[first:] for part in heads))
    chosen = {f"rate {rate}": i for i, rate in enumerate(FORMER)}
    for by in ("accuracy", "log-loss"):
        chosen[f"former grid, by {by}"] = choose(heads, *there, by)[0]
        chosen[f"shipped grid, by {by}"] = first + choose(shipped, *there, by)[0]
    return {name: test[which] for name, which in chosen.items()}


def summary(each: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation over seeds."""
    found = {}
    for name in each[0]:
        top_1, error = zip(*(one[name] for one in each), strict=True)
        found[name] = {
            **{"top-1": round(mean(top_1), 2), "top-1 std": round(stdev(top_1), 3)},
            **{"ece": round(mean(error), 2), "ece std": round(stdev(error), 3)},
        }
    return found


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument(
        "--images", type=int, default=4000, help="number of training images; test has half as many"
    )
    parser.add_argument("--crops", type=int, default=2, help="crops of each training image")
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("crops.pt"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.cache.is_file():
        with torch.no_grad():
            features(args.data, args.images, args.crops, args.cache)
    of = torch.load(args.cache)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    found = {
        kind: summary([scores(of, seed, args.epochs, split) for seed in seeds])
        for kind, split in (("same held-out part", 0), ("another held-out part", None))
    }
    asked = {name: value for name, value in vars(args).items() if name != "cache"}
    print(json.dumps({**asked, **environment("cpu"), **found}))


if __name__ == "__main__":
    main()
