"""Logistic regression with 1 % and 10 % of the labels."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import stdev
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from compressive.data.splits import few_labels, imagenet_list
from compressive.evaluation import logistic
from compressive.evaluation.context import EvalContext
from compressive.evaluation.features import Features
from compressive.evaluation.tasks.logistic import LOGISTIC_REGRESSION, select_penalty
from compressive.metrics import hits
from compressive.platforms.float64 import to_float64

_DRAWS = 3
_DEFAULT_PENALTY = 1.0  # used if too few images can be held out to choose one


class FewLabelFit(NamedTuple):
    """A classifier fitted on few images, its penalty, and how the penalty was chosen."""

    fits: logistic.Fits
    penalty: float
    chosen_on: str
    warning: str | None = None


def run(context: EvalContext, *, penalties: Sequence[float] = logistic.PENALTIES) -> None:
    """Record the mean accuracy of three draws for each fraction of the labels.

    SimCLR's lists for ImageNet replace the draws if they are in `options.benchmark_root`. A
    fraction with less than one image per class is skipped.
    """
    labels = context.features("train").labels
    classes = context.classes
    for share in (0.01, 0.1):
        if (count := int(share * len(labels) + 1e-6)) < len(labels.unique()):
            context.skip(f"few labels {share:.0%}: {count:,} labels for {classes:,} classes")
        else:
            _record_share(context, share, penalties)


def _record_share(context: EvalContext, share: float, penalties: Sequence[float]) -> None:
    train, test = context.features("train"), context.features("test")
    # The lists include images that --held-out evaluates on.
    lists = None if context.splits.held_out else context.options.benchmark_root
    file = None if lists is None else lists / f"{share * 100:.0f}percent.txt"
    right, top_5, sizes, fits = [], [], [], []
    for some in _subsets(context, train, share, file):
        found = fit_few(Features(*(part[some] for part in train)), context.classes, penalties)
        logits = found.fits.logits(test.feats)
        right.append(hits(logits, test.labels))
        top_5.append(hits(logits, test.labels, min(5, context.classes)))
        sizes.append(len(some))
        fits.append(found)
    warnings = [found.warning for found in fits if found.warning]
    protocol = context.protocol(
        classifier=f"{LOGISTIC_REGRESSION}, l2 by log-loss",
        augmentation="none",
        labels=sizes,
        chosen={"l2": [found.penalty for found in fits]},
        **{"chosen_on": fits[-1].chosen_on},
        **({"warnings": warnings} if warnings else {}),
        **({"list": str(file)} if len(fits) == 1 else {}),
    )
    accuracies = {"top-1": right, **({"top-5": top_5} if context.classes > 5 else {})}
    images, task = context.images("test", test.index), f"few labels {share:.0%}"
    for metric, each_draw in accuracies.items():
        hits_of_draws, name = to_float64(torch.stack(each_draw)), context.splits.name
        mean, draws = hits_of_draws.mean(0), hits_of_draws.mean(1).tolist()
        own = {**protocol, "draws": draws}
        if len(draws) > 1:
            own["deviation_over_draws"] = stdev(draws)
        context.results.add(task, name, metric, mean, protocol=own, images=images, draws=draws)


def _subsets(
    context: EvalContext, train: Features, share: float, file: Path | None
) -> Iterator[Int[Tensor, " some"]]:
    """Yield the rows of the train features whose labels are used, once per draw."""
    if file is not None and file.is_file() and context.classes == 1000:
        places = imagenet_list(file, context.source("train")).to(context.device)
        yield torch.isin(train.index, places).nonzero()[:, 0]
        return
    labels = train.labels.cpu()
    for draw in range(_DRAWS):
        yield few_labels(labels, share, draw=draw, seed=context.seed).to(context.device)
        context.progress(f"few labels {share:.0%}", draw + 1, _DRAWS, "")


def fit_few(
    some: Features, classes: int, penalties: Sequence[float] = logistic.PENALTIES
) -> FewLabelFit:
    """Fit a classifier on few images; choose its penalty on every fifth image of each class.

    Classes with one image are never held out, because no image would be left to fit. If half of
    the classes or more have one image, a default penalty is used. The criterion is the log-loss:
    the accuracy of a hundred images is mostly chance, and many penalties tie. (CIFAR-10, 500
    labels, six draws, two encoders. By accuracy, l2 is 2e-5 to 316 and 1.5 points worse than the
    best one, with a standard deviation of 1.3. By the log-loss it is 0.2 to 0.6, 0.8 points worse,
    with a standard deviation of 0.4.)
    """
    order = some.labels.argsort(stable=True)
    sizes = some.labels.bincount()
    first = sizes.cumsum(0) - sizes
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first[some.labels[order]]
    held = (rank % 5 == 0) & (sizes[some.labels] > 1)
    if 2 * (sizes > 1).sum() <= (sizes > 0).sum():
        fits = logistic.fit(some.feats, some.labels, classes=classes, penalties=[_DEFAULT_PENALTY])
        reason = "not chosen: half of the classes or more have one image"
        return FewLabelFit(fits, _DEFAULT_PENALTY, reason)
    fit, held = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
    found = select_penalty(some, fit, held, classes, "log-loss", penalties)
    how = "the log-loss of a fifth of the subset, then fitted on all of it"
    return FewLabelFit(found.fit, found.penalty, how, found.warning)
