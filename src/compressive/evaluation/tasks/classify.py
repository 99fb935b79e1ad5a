"""Tasks with labels: linear, logistic, few labels and nearest neighbors on frozen features."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import stdev
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import augment
from compressive.augment.params import View
from compressive.data.sampler import BatchIndices, batch_index_stream
from compressive.data.splits import few_labels, imagenet_list
from compressive.evaluation import logistic
from compressive.evaluation.context import Classifier, EvalContext
from compressive.evaluation.features import Features, forward
from compressive.evaluation.scores import add_scores
from compressive.evaluation.tasks.linear_head import LEARNING_RATES, WIDER, choose, train_heads
from compressive.knn import nearest_neighbors
from compressive.metrics import hits, nll, top_k_accuracy
from compressive.rng import image_keys

NEIGHBORS, TEMPERATURE = (20, 200), 0.07
SHARES, DRAWS = (0.01, 0.1), 3
IMAGENET = 1000  # classes
DEFAULT = 1.0  # l2 where too little can be held out to choose it
FEW = 1000  # held-out images: below, how many of them are right is mostly chance
MOST = 2**29  # numbers: beyond, full-batch methods in float64 take more memory than there is
_CROPS = 2  # pretraining has views 0 and 1: with its seed a head would see the crops of one again
_TRAINING = View(jitter=0.0, gray=0.0, blur=0.0)  # random crop and flip, as the paper's heads see


def linear(exam: EvalContext, *, epochs: int = 0) -> Classifier:
    """The paper's linear evaluation: crops and flips, all learning rates in one pass.

    The rate is chosen on the part of train that was held out, and test is read once.
    """
    train, (fit, held) = exam.features("train"), exam.parts
    epochs = epochs or _epochs(len(fit), exam.device.type)
    batch = 1024 if len(fit) >= 20_000 else min(256, len(fit))
    steps = max(1, epochs * len(fit) // batch)
    rates = LEARNING_RATES if exam.classes == IMAGENET else WIDER
    heads = train_heads(
        _augmented(exam, train.index[fit], batch, steps),
        feat=train.feats.shape[1],
        classes=exam.classes,
        steps=steps,
        learning_rates=[rate * batch / 256 for rate in rates],
        device=exam.device,
    )
    best, scores = choose(heads, train.feats[held], train.labels[held])
    chosen = heads.only(best)
    exam.classifier = lambda feats: chosen.logits(feats)[0]
    protocol = exam.protocol(
        classifier="linear, SGD with Nesterov momentum 0.9, cosine, no decay",
        augmentation="random crop of 8 to 100 % of the area, flip",
        epochs=epochs,
        batch=batch,
        steps=steps,
        chosen={"learning_rate_for_256": rates[best]},
        **{"chosen_on": f"{len(held):,} training images", "train_images": len(fit)},
        **{"accuracy_there": dict(zip(map(str, rates), scores, strict=True))},
        **({"warning": "the best rate ends the grid"} if best in (0, len(scores) - 1) else {}),
    )
    exam.head = {
        "head": f"linear, {epochs} epochs",
        "chosen": protocol["chosen"],
        "learned_from": exam.images("train", train.index[fit]),
    }
    _score(exam, "linear", exam.classifier, protocol)
    return exam.classifier


def logistic_regression(exam: EvalContext) -> None:
    """45 penalties on central crops; chosen on the held-out part, then all of train.

    By accuracy, or by the log-loss where few are held out: of 6 images 56 was chosen, the strongest
    of those that had all right, with an ECE of 68 %; of 122 in 102 classes 0.018, with an NLL of 7.
    """
    train, (fit, held) = exam.features("train"), exam.parts
    if train.feats.numel() > MOST:
        exam.skip(f"logistic regression on {len(train.feats):,} images, which is for smaller sets")
        return
    how = "log-loss" if len(held) < FEW else "accuracy"
    found = _select(train, fit, held, exam.classes, how)
    protocol = exam.protocol(
        classifier="multinomial logistic regression to its minimum, sum of losses + l2/2 |W|^2",
        augmentation="none",
        chosen={"l2": found.penalty},
        **{"chosen_on": f"{len(held):,} training images by {how}, then fitted on all"},
        converged=f"{int(found.sweep.converged.sum())} of {len(found.scores)} penalties",
        **({"warning": found.warning} if found.warning else {}),
    )
    _score(exam, "logistic", found.fit.logits, protocol)


def few_label(exam: EvalContext, lists: Path | None = None) -> None:
    """1 % and 10 % of the labels, three draws each; the penalty is chosen inside the subset.

    lists: a folder that may hold SimCLR's lists for ImageNet, which then take the place of draws.
    A share that has not one image of each class is left out.
    """
    train, test = exam.features("train"), exam.features("test")
    for share in SHARES:
        right, top_5, penalties, sizes, warnings, how = [], [], [], [], [], ""
        file = None if lists is None else lists / f"{share * 100:.0f}percent.txt"
        if (labels := int(share * len(train.labels) + 1e-6)) < len(train.labels.unique()):
            exam.skip(f"few labels {share:.0%}: {labels:,} labels for {exam.classes:,} classes")
            continue
        for some in _subsets(exam, train, share, file):
            found, penalty, how = _folds(Features(*(part[some] for part in train)), exam)
            fits = found.fit if isinstance(found, logistic.Selection) else found
            warning = found.warning if isinstance(found, logistic.Selection) else None
            logits = fits.logits(test.feats)
            right.append(hits(logits, test.labels))
            top_5.append(hits(logits, test.labels, min(5, exam.classes)))
            penalties.append(penalty)
            sizes.append(len(some))
            warnings += [warning] if warning else []
        each = [float(hit.double().mean()) for hit in right]
        protocol = exam.protocol(
            classifier="multinomial logistic regression to its minimum, sum of losses + l2/2 "
            "|W|^2, l2 by log-loss",
            augmentation="none",
            labels=sizes,
            chosen={"l2": penalties},
            **{"chosen_on": how},
            **({"warnings": warnings} if warnings else {}),
            draws=each,
            **({"deviation_over_draws": stdev(each)} if len(each) > 1 else {"list": str(file)}),
        )
        figures = {"top-1": right, **({"top-5": top_5} if exam.classes > 5 else {})}
        images = exam.images("test", test.index)
        for metric, each_draw in figures.items():
            exam.results.add(
                f"few labels {share:.0%}",
                exam.splits.name,
                metric,
                torch.stack(each_draw).double().mean(0),
                protocol=protocol,
                images=images,
            )


def knn(exam: EvalContext) -> None:
    """Votes of the nearest training images by cosine."""
    train, test = exam.features("train"), exam.features("test")
    for k in NEIGHBORS:
        if k > len(train.feats):
            exam.skip(f"kNN with k = {k}: there are {len(train.feats)} training images")
            continue
        votes = nearest_neighbors(
            train.feats,
            train.labels,
            test.feats,
            classes=exam.classes,
            neighbors=k,
            temperature=TEMPERATURE,
        )
        protocol = exam.protocol(bank=len(train.feats), k=k, temperature=TEMPERATURE)
        right = hits(votes, test.labels)
        images = exam.images("test", test.index)
        exam.results.add(
            f"kNN {k}", exam.splits.name, "top-1", right, protocol=protocol, images=images
        )


def _subsets(
    exam: EvalContext, train: Features, share: float, file: Path | None
) -> Iterator[Int[Tensor, " some"]]:
    """Rows of the train features whose labels are known."""
    if file is not None and file.is_file() and exam.classes == IMAGENET:
        places = imagenet_list(file, exam.source("train")).to(exam.device)
        yield torch.isin(train.index, places).nonzero()[:, 0]
        return
    labels = train.labels.cpu()
    for draw in range(DRAWS):
        yield few_labels(labels, share, draw=draw, seed=exam.seed).to(exam.device)


def _score(
    exam: EvalContext, task: str, classifier: Classifier, protocol: dict[str, object]
) -> None:
    test = exam.features("test")
    logits = classifier(test.feats)
    add_scores(
        exam.results,
        task,
        exam.splits.name,
        logits,
        test.labels,
        protocol,
        seen=exam.features("train").labels,
        classes=exam.splits.test.classes,
        images=exam.images("test", test.index),
    )


def _augmented(
    exam: EvalContext, places: Int[Tensor, " fit"], batch: int, steps: int
) -> Iterator[tuple[Float[Tensor, "batch feat"], Int[Tensor, " batch"]]]:
    """Features of random crops and flips of these images, in an order by the seed."""
    places, subject = places.cpu(), exam.subject
    orders = islice(batch_index_stream(len(places), batch, seed=exam.seed), steps)
    portions = (BatchIndices(places[portion.index], portion.epoch) for portion in orders)
    for step, found in enumerate(exam.loader("train").batches(portions)):
        keys = image_keys(found.index, seed=exam.seed, epoch=found.epoch, view=_CROPS)
        view = replace(_TRAINING, antialias=subject.antialias)
        height, width = found.height, found.width
        x = augment(found.images, keys, view, subject.size, height=height, width=width)
        x = exam.recolored(x)
        if step % 10 == 0:
            exam.tell("linear", step, steps)
        yield forward(subject.network, x, exam.dtype), found.label


def _epochs(count: int, device: str) -> int:
    """40 as the paper has for ImageNet; a CPU sees 100,000 crops at most."""
    return 40 if device != "cpu" else max(1, min(40, 100_000 // count))


def _select(
    train: Features,
    fit: Int[Tensor, " fit"],
    held: Int[Tensor, " held"],
    classes: int,
    how: Literal["accuracy", "log-loss"],
) -> logistic.Selection:
    return logistic.select(
        (train.feats[fit], train.labels[fit]),
        (train.feats[held], train.labels[held]),
        top_k_accuracy if how == "accuracy" else lambda logits, labels: -nll(logits, labels),
        classes=classes,
    )


def _folds(
    some: Features, exam: EvalContext
) -> tuple[logistic.Selection | logistic.Fits, float, str]:
    """A classifier of a few images, its penalty, and how that was chosen.

    On every fifth image of each class that has two or more: of a class with one image nothing can
    be learned once it is held out, and where that is most of them there is too little to choose
    by. By the log-loss: a hundred images are right or wrong by chance,
    and many penalties are right equally often. (CIFAR-10, 500 labels, six draws, two encoders: by
    accuracy it is 2e-5 to 316 and costs 1.5 points against the best one, with a deviation of 1.3;
    by the log-loss 0.2 to 0.6, 0.8 points and 0.4.)
    """
    order = some.labels.argsort(stable=True)
    sizes = some.labels.bincount()
    first = sizes.cumsum(0) - sizes
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first[some.labels[order]]
    held = (rank % 5 == 0) & (sizes[some.labels] > 1)
    if 2 * (sizes > 1).sum() <= (sizes > 0).sum():
        fits = logistic.fit(some.feats, some.labels, classes=exam.classes, penalties=[DEFAULT])
        return fits, DEFAULT, "not chosen: half of the classes or more have one image"
    fit, held = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
    found = _select(some, fit, held, exam.classes, "log-loss")
    return found, found.penalty, "the log-loss of a fifth of the subset, then fitted on all of it"
