"""Linear probe and kNN during training, tested on held-out labels of the training split."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from compressive.augment.ops import IMAGENET_COLORS, Channels, center_crop, normalize
from compressive.checks import autocast
from compressive.data.loaders import Batch
from compressive.data.sampler import BatchIndices
from compressive.distributed import mean_value, world_size
from compressive.platforms.float64 import to_float64
from compressive.rng import uniforms_of_all
from compressive.train.knn import nearest_neighbors

_HELD = 2**32 - 1  # an epoch and view that no run reaches: random numbers of their own stream


class Accuracy(NamedTuple):
    """Accuracy on held-out images."""

    probe: float
    neighbors: float
    count: int


def held_out_labels(count: int, share: float, seed: int) -> Bool[Tensor, " count"]:
    """Return which labels are held out: each with probability `share`, by its index alone."""
    return uniforms_of_all(count, 1, seed=seed, epoch=_HELD, view=_HELD)[:, 0] < share


class OnlineProbe(nn.Module):
    """Linear classifier that is trained with the encoder, on its detached features."""

    # A batch norm without weights standardizes features: one learning rate fits all networks.

    def __init__(self, feat: int, classes: int) -> None:
        super().__init__()
        self.norm: nn.BatchNorm1d = nn.BatchNorm1d(feat, affine=False)
        self.linear: nn.Linear = nn.Linear(feat, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, feats: Float[Tensor, "batch feat"]) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        return self.linear(self.norm(feats.detach().float()))

    def loss(
        self, feats: Float[Tensor, "batch feat"], label: Int[Tensor, " batch"]
    ) -> Float[Tensor, ""]:
        """Return the cross-entropy over the images that have a label (not -1)."""
        # DDP averages over processes. That mean is the loss over the images of all processes.
        total = F.cross_entropy(self(feats), label, ignore_index=-1, reduction="sum")
        count = mean_value((label >= 0).sum().float())
        return total / count.clamp(min=1 / world_size())  # the smallest nonzero count


@torch.no_grad()
def features(
    encoder: nn.Module,
    batches: Iterable[Batch],
    size: int,
    precision: torch.dtype,
    *,
    antialias: bool = False,
    channels: Channels = IMAGENET_COLORS,
) -> tuple[Float[Tensor, "count feat"], Int[Tensor, " count"]]:
    """Return float32 features of center crops in evaluation mode, and indices of the images."""
    was_training = encoder.training
    encoder.eval()
    feats, index = [], []
    try:
        for batch in batches:
            sides = {"height": batch.height, "width": batch.width}
            view = center_crop(batch.images, size, **sides, antialias=antialias)
            with autocast(view.device, precision):
                feats.append(encoder(normalize(view, mean=channels.mean, std=channels.std)).float())
            index.append(batch.index)
    finally:
        encoder.train(was_training)
    return torch.cat(feats), torch.cat(index)


@torch.no_grad()
def online_accuracy(
    encoder: nn.Module,
    probe: OnlineProbe,
    batches: Callable[[Iterator[BatchIndices]], Iterable[Batch]],
    labels: Int[Tensor, " count"],
    held: Bool[Tensor, " count"],
    *,
    size: int,
    antialias: bool,
    channels: Channels,
    precision: torch.dtype,
    neighbors: int,
    bank: int,
) -> Accuracy | None:
    """Return the accuracy of probe and kNN on held-out labels, or None if there are none."""
    # `bank` limits both the number of reference images and the number of held-out images.
    seen, asked = _some(~held & (labels >= 0), bank), _some(held & (labels >= 0), bank)
    if not len(seen) or not len(asked):
        return None
    wanted = torch.cat([seen, asked])
    plan = (BatchIndices(part, torch.zeros_like(part)) for part in wanted.split(256))
    kind = {"antialias": antialias, "channels": channels}
    feats, index = features(encoder, batches(plan), size, precision, **kind)
    # Drop substitutes of unreadable files.
    is_there = index == wanted.to(index.device)
    feats, index = feats[is_there], index[is_there]
    label, asked_part = labels.to(feats.device)[index], held.to(feats.device)[index]
    bank_part, truth = ~asked_part, label[asked_part]
    if not len(truth) or not bank_part.any():
        return None
    known, classes = (feats[bank_part], label[bank_part]), probe.linear.out_features
    votes = nearest_neighbors(*known, feats[asked_part], classes=classes, neighbors=neighbors)
    was_training = probe.training
    logits = probe.eval()(feats[asked_part])
    probe.train(was_training)
    right = torch.stack([logits.argmax(1) == truth, votes.argmax(1) == truth])
    by_probe, by_neighbors = to_float64(right).mean(1).tolist()
    return Accuracy(by_probe, by_neighbors, len(truth))


def _some(which: Bool[Tensor, " count"], most: int) -> Int[Tensor, " some"]:
    """Return at most `most` of these indices, evenly spaced, so that sorted classes all occur."""
    places = which.nonzero()[:, 0]
    return places[evenly_spaced_indices(len(places), most)]


def evenly_spaced_indices(count: int, most: int) -> Int[Tensor, " some"]:
    """Return at most `most` of the indices 0 to count - 1, from the first to the last."""
    # Use integers: float32 would round the last of 2^24 or more indices past the end.
    most = min(most, count)
    return torch.arange(most) * (count - 1) // max(1, most - 1)
