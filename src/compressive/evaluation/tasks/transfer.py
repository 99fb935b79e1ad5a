"""Transfer: logistic regression on each of the eleven data sets of the paper."""

import torch

from compressive.data.fingerprint import DatasetFingerprint
from compressive.evaluation import logistic
from compressive.evaluation.context import EvalContext
from compressive.evaluation.datasets.transfer import DATASETS, Split, open_transfer
from compressive.evaluation.scores import add_scores
from compressive.evaluation.tasks.logistic import LOGISTIC_REGRESSION
from compressive.metrics import mean_per_class_accuracy, top_k_accuracy


def run(context: EvalContext) -> None:
    """Record the scores on each data set that is in `options.benchmark_root`."""
    root = context.options.benchmark_root
    if root is None:
        context.skip("transfer, which needs the folder of its datasets (--benchmark-root DIR)")
        return
    for name in DATASETS:
        try:
            evaluate_transfer(context, name, open_transfer(name, root, seed=context.seed))
        except (FileNotFoundError, ValueError) as problem:
            context.skip(f"transfer, {name}: {problem}")


def evaluate_transfer(context: EvalContext, name: str, split: Split) -> None:
    """Choose the penalty on the validation part by the metric of the paper; record test scores."""
    # Resize the shorter side to the input size and crop the center, without a factor of 0.875.
    crop = context.crop.whole()
    train, val, test = (
        context.features_of(source, crop, f"{name}, {part}")
        for part, source in zip(("train", "val", "test"), split[:3], strict=True)
    )
    found = logistic.select(
        (train.feats, train.labels),
        (val.feats, val.labels),
        mean_per_class_accuracy if split.metric == "mean per class" else top_k_accuracy,
        classes=len(split.train.classes or ()),
    )
    protocol = {
        **context.protocol(**crop.protocol()),
        "classifier": LOGISTIC_REGRESSION,
        "augmentation": "none",
        "chosen": {"l2": found.penalty},
        "chosen_on": f"{len(val.feats):,} validation images by {split.metric}, then all fitted",
        "paper_metric": split.metric,
        "converged": f"{int(found.sweep.converged.sum())} of {len(found.scores)} penalties",
        "notes": list(split.notes),
        **({"held": split.held.tolist()} if split.held is not None else {}),
        **({"warning": found.warning} if found.warning else {}),
    }
    add_scores(
        context.results,
        "transfer",
        name,
        found.fit.logits(test.feats),
        test.labels,
        protocol,
        seen=torch.cat([train.labels, val.labels]),
        classes=split.train.classes,
        images=DatasetFingerprint(split.test).of(test.index.tolist()),
    )
