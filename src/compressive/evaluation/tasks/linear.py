"""Linear evaluation as in the paper; heads for all learning rates are trained in one pass."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from compressive.augment.ops import augment
from compressive.augment.params import View
from compressive.data.sampler import BatchIndices, batch_index_stream
from compressive.evaluation.context import EvalContext, FeatureClassifier
from compressive.evaluation.cuda_graph import GraphedFunction
from compressive.evaluation.features import forward
from compressive.evaluation.scores import add_test_scores
from compressive.metrics import nll, top_k_accuracy
from compressive.rng import image_keys

LEARNING_RATES = (0.4, 0.3, 0.2, 0.1, 0.05)  # of the paper, for batches of 256 images
WIDER = (3.2, 1.6, 0.8, *LEARNING_RATES)  # for small data sets, which have few steps
_HEAD_VIEW = 2  # pretraining uses views 0 and 1: the head must not see the same crops again
_TRAINING_VIEW = View(jitter=0.0, gray=0.0, blur=0.0)  # random crop and flip, as in the paper


class Heads(NamedTuple):
    """Linear classifiers, one for each learning rate."""

    weight: Float[Tensor, "heads feat classes"]
    bias: Float[Tensor, "heads classes"]

    def logits(self, feats: Float[Tensor, "batch feat"]) -> Float[Tensor, "heads batch classes"]:
        """Return the logits of each head."""
        return torch.baddbmm(self.bias[:, None], feats.expand(len(self.bias), -1, -1), self.weight)

    def only(self, which: int) -> "Heads":
        """Return one head."""
        return Heads(self.weight[which : which + 1], self.bias[which : which + 1])


def run(context: EvalContext) -> None:
    """Train a linear classifier on random crops and record its scores on test.

    The learning rate is chosen on the held-out part of train. Test is read once. For 1000 classes
    the grid is the paper's and the criterion is accuracy. Otherwise the criterion is the log-loss:
    many rates tie in accuracy and differ in calibration (docs/results/2026-11-17-verdicts.md).
    """
    train, (fit, held) = context.features("train"), context.parts
    if context.device.type != "cpu":  # the CPU would be busy
        context.open_ahead("test")
    # 40 epochs as in the paper; on a CPU at most 100,000 crops.
    most = 40 if context.device.type != "cpu" else max(1, min(40, 100_000 // len(fit)))
    epochs = context.options.epochs or most
    batch = 1024 if len(fit) >= 20_000 else min(256, len(fit))
    steps = max(1, epochs * len(fit) // batch)
    rates, by = (WIDER, "log-loss") if context.classes != 1000 else (LEARNING_RATES, "accuracy")
    heads = train_heads(
        _augmented_features(context, train.index[fit], batch, steps),
        feat=train.feats.shape[1],
        classes=context.classes,
        steps=steps,
        learning_rates=[rate * batch / 256 for rate in rates],
        device=context.device,
    )
    best, scores = choose(heads, train.feats[held], train.labels[held], by)
    chosen = heads.only(best)
    context.classifier = lambda feats: chosen.logits(feats)[0]
    protocol = context.protocol(
        classifier=f"linear, SGD with Nesterov momentum 0.9, cosine, no decay, rate by {by}",
        augmentation="random crop of 8 to 100 % of the area, flip",
        epochs=epochs,
        batch=batch,
        steps=steps,
        chosen={"learning_rate_for_256": rates[best]},
        **{"chosen_on": f"{len(held):,} training images", "train_images": len(fit)},
        **{"accuracy_there": dict(zip(map(str, rates), scores, strict=True))},
        **({"warning": "the best rate ends the grid"} if best in (0, len(scores) - 1) else {}),
    )
    context.head = {
        "head": f"linear, {epochs} epochs, rate by {by}",
        "chosen": protocol["chosen"],
        "learned_from": context.images("train", train.index[fit]),
    }
    add_test_scores(context, "linear", context.classifier, protocol)


def linear_classifier(context: EvalContext) -> FeatureClassifier:
    """Return the classifier of the linear evaluation, after running it if necessary."""
    if context.classifier is None:
        run(context)
    assert context.classifier is not None
    return context.classifier


def train_heads(
    batches: Iterable[tuple[Float[Tensor, "batch feat"], Int[Tensor, " batch"]]],
    *,
    feat: int,
    classes: int,
    steps: int,
    learning_rates: Sequence[float],
    device: torch.device,
) -> Heads:
    """Train one head per learning rate on the same batches.

    SGD with Nesterov momentum 0.9 and no decay; the cosine schedule starts at the learning rate
    and ends at zero. The heads share no parameters, so that each is trained as it would be alone.
    """
    heads = Heads(
        torch.zeros(len(learning_rates), feat, classes, device=device),
        torch.zeros(len(learning_rates), classes, device=device),
    )
    speeds = [torch.zeros_like(part) for part in heads]
    peaks = torch.tensor(learning_rates, device=device)
    cosines = [1 + math.cos(math.pi * step / steps) for step in range(steps)]

    def update(feats: Tensor, labels: Tensor, cosine: Tensor) -> None:
        rates = 0.5 * peaks * cosine
        # The gradients of the mean cross-entropy in weights and biases.
        error = heads.logits(feats).softmax(-1)
        error -= F.one_hot(labels, classes)
        error /= len(labels)
        gradients = feats.T @ error, error.sum(1)
        for part, speed, gradient in zip(heads, speeds, gradients, strict=True):
            speed.mul_(0.9).add_(gradient)
            part.sub_(rates.view(-1, *[1] * (part.ndim - 1)) * (gradient + 0.9 * speed))

    graphed = GraphedFunction(update, device)
    for (feats, labels), cosine in zip(batches, torch.tensor(cosines, device=device), strict=False):
        graphed(feats, labels, cosine)
    return heads


def choose(
    heads: Heads, feats: Float[Tensor, "held feat"], labels: Int[Tensor, " held"], by: str
) -> tuple[int, list[float]]:
    """Return the best head by "accuracy" or "log-loss", and the accuracy of each.

    The log-loss breaks ties, which are common: of 11 rates on 5,000 images of CIFAR-10 four tied.
    """
    accuracy, loss = (
        torch.stack([metric(logits, labels) for logits in heads.logits(feats)]).tolist()
        for metric in (top_k_accuracy, nll)
    )
    share = accuracy if by == "accuracy" else [0.0] * len(loss)
    return max(range(len(loss)), key=lambda i: (share[i], -loss[i])), accuracy


def _augmented_features(
    context: EvalContext, places: Int[Tensor, " fit"], batch: int, steps: int
) -> Iterator[tuple[Float[Tensor, "batch feat"], Int[Tensor, " batch"]]]:
    """Yield features of random crops and flips of these images, shuffled by the seed."""
    places, model = places.cpu(), context.model
    orders = islice(batch_index_stream(len(places), batch, seed=context.seed), steps)
    indices = (BatchIndices(places[order.index], order.epoch) for order in orders)
    view = replace(_TRAINING_VIEW, antialias=model.antialias)

    def features(
        images: Tensor, height: Tensor, width: Tensor, index: Tensor, epoch: Tensor
    ) -> Tensor:
        keys = image_keys(index, seed=context.seed, epoch=epoch, view=_HEAD_VIEW)
        x = augment(images, keys, view, model.size, height=height, width=width)
        return forward(model.network, context.renormalize(x), context.dtype)

    graphed = GraphedFunction(features, context.device)
    for step, found in enumerate(context.loader("train").batches(indices)):
        if step % 10 == 0:
            context.progress("linear", step, steps, "steps")
        feats = graphed(found.images, found.height, found.width, found.index, found.epoch)
        yield feats, found.label
