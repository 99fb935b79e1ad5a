"""Compare an encoder with its copy that has 8 bits per weight: features and accuracy.

    python benchmarks/eight_bits.py runs/a DATA --train 5000 --test 5000 --device cpu

Extracts features of the same images with both. Prints one JSON line: cosines and relative errors of
the features of test images, kNN and logistic accuracy of both, and on how many test images the
predictions are equal. `--train 0 --test 0` uses all images.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment

from compressive.data.source import subset
from compressive.data.splits import stratified
from compressive.device import pick_device
from compressive.encoder import pack
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import open_model
from compressive.evaluation.logistic import PENALTIES, select
from compressive.evaluation.results import Results
from compressive.metrics import nll
from compressive.train.knn import nearest_neighbors


def measured(path: Path, asked: argparse.Namespace) -> dict[str, Tensor]:
    """Return test features, labels, and predictions of kNN and logistic regression."""
    device = pick_device(asked.device)
    splits = open_splits(asked.data, seed=0, most=asked.train)
    if asked.test:
        chosen = torch.randperm(len(splits.test), generator=torch.Generator().manual_seed(0))
        splits = splits._replace(test=subset(splits.test, chosen[: asked.test].sort().values))
    context = EvalContext(open_model(str(path), device), splits, Results("bits"), device=device)
    (bank, labels), (feats, right) = (
        (part.feats, part.labels) for part in (context.features("train"), context.features("test"))
    )
    votes = nearest_neighbors(bank, labels, feats, classes=context.classes)
    fit, held = stratified(labels, 0.2, seed=0)
    chosen = select(
        (bank[fit], labels[fit]),
        (bank[held], labels[held]),
        lambda logits, right: -nll(logits, right),  # less noisy than the accuracy
        classes=context.classes,
        penalties=PENALTIES[::3],
    )
    logits = chosen.fit.logits(feats)
    found = {"feats": feats, "labels": right, "kNN": votes.argmax(1), "logistic": logits.argmax(1)}
    return {name: value.cpu() for name, value in found.items()}


def compared(whole: dict[str, Tensor], small: dict[str, Tensor]) -> dict[str, Any]:
    """Return errors of the features, and accuracies in percent."""
    before, after = whole["feats"].double(), small["feats"].double()
    cosines = torch.cosine_similarity(before, after)
    errors = (after - before).norm(dim=1) / before.norm(dim=1)
    found: dict[str, Any] = {
        "cosine": {"least": cosines.min().item(), "mean": cosines.mean().item()},
        "relative_error": {"mean": errors.mean().item(), "largest": errors.max().item()},
    }
    for name in ("kNN", "logistic"):
        right = [(part[name] == part["labels"]).double() for part in (whole, small)]
        found[name] = {
            "before": 100 * right[0].mean().item(),
            "8 bits": 100 * right[1].mean().item(),
            "standard error of the difference": 100
            * ((right[1] - right[0]).std() / len(right[0]) ** 0.5).item(),
            "equal predictions": 100 * (whole[name] == small[name]).double().mean().item(),
        }
    return found


def main() -> None:
    """Print the comparison as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("encoder")
    parser.add_argument("data")
    parser.add_argument("--train", type=int, default=0)
    parser.add_argument("--test", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        small = pack(asked.encoder, Path(folder) / "small.safetensors", bits=8)
        size = small.stat().st_size
        both = measured(Path(asked.encoder), asked), measured(small, asked)
    asked_for = {"encoder": Path(asked.encoder).name, "data": Path(asked.data).name}
    counts = {"train": asked.train or "all", "test": len(both[0]["labels"]), "bytes": size}
    where = environment(str(pick_device(asked.device)))
    print(json.dumps({**asked_for, **counts, **compared(*both), "environment": where}))


if __name__ == "__main__":
    main()
