"""Scores of logits on shifted images: right by any of several ids, in videos, over corruptions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressive.evaluation.datasets.ground_truth import GroundTruth

# Top-1 errors of AlexNet, the mean of the five severities (robustness_metrics of google-research).
ALEXNET_ERROR = {
    "gaussian_noise": 0.886,
    "shot_noise": 0.894,
    "impulse_noise": 0.923,
    "defocus_blur": 0.820,
    "glass_blur": 0.826,
    "motion_blur": 0.786,
    "zoom_blur": 0.798,
    "snow": 0.867,
    "frost": 0.827,
    "fog": 0.819,
    "brightness": 0.565,
    "contrast": 0.853,
    "elastic_transform": 0.646,
    "pixelate": 0.718,
    "jpeg_compression": 0.607,
}


class Score(NamedTuple):
    """One column of a results table: which items were right; their mean is the accuracy."""

    metric: str
    protocol: str
    hits: Bool[Tensor, " items"]


class OverCorruptions(NamedTuple):
    """A mean over types of corruption, and which of the 15 it is without."""

    value: float
    left_out: tuple[str, ...]


def scores(logits: Float[Tensor, "batch classes"], answers: GroundTruth) -> tuple[Score, ...]:
    """Every column of a robustness set: the paper's first, then the community's."""
    shape = (len(answers.right), answers.classes)
    if logits.shape != shape:
        raise ValueError(f"logits must be (images, classes), {shape}, got {tuple(logits.shape)}")
    if answers.owner is None:
        every = correct(logits, answers.right)
        plain = Score("top-1", f"argmax over all {logits.shape[1]} classes (the paper's)", every)
        if answers.allowed is None:
            return (plain,)
        masked = correct(logits, answers.right, answers.allowed)
        among = f"argmax over the {len(answers.allowed)} classes of the set (the community's)"
        return plain, Score("top-1 masked", among, masked)
    assert answers.anchors is not None
    assert answers.neighbors is not None
    projected = video_logits(logits, answers.owner, answers.video_classes)
    frames = correct(projected, answers.right)
    by = "highest logit per video class"
    return (
        Score("pm0", f"{by}, anchor frames (the paper's)", frames[answers.anchors]),
        Score("frames", f"{by}, all frames (the paper's other reading)", frames),
        Score(
            "pm10",
            f"{by}, anchors right with all neighbors within 10 frames (the community's)",
            with_neighbors(frames, answers.anchors, answers.neighbors),
        ),
    )


def correct(
    logits: Float[Tensor, "batch classes"],
    right: Int[Tensor, "batch most"],
    allowed: Int[Tensor, " some"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Whether the highest logit, of all or of the allowed classes, is any of the right ones.

    Of equal logits the first counts. A row with NaN is a miss.
    """
    if allowed is None:
        choice = logits.argmax(1)
    else:
        logits = logits[:, allowed]
        choice = allowed[logits.argmax(1)]
    return (choice[:, None] == right).any(1) & ~logits.isnan().any(1)


def video_logits(
    logits: Float[Tensor, "batch ids"], owner: Int[Tensor, " ids"], classes: int
) -> Float[Tensor, "batch video_classes"]:
    """The highest logit among the ImageNet ids that belong to each video class.

    -inf for a class that no id belongs to: 0 would win where all logits are negative. The highest
    of these is at the class of the highest logit among the ids that belong to any.
    """
    # Ids of no class go to one more, which is dropped: no mask, whose size the host would wait for.
    target = torch.where(owner < 0, classes, owner).expand(len(logits), -1)
    empty = logits.new_full((len(logits), classes + 1), -torch.inf)
    return empty.scatter_reduce(1, target, logits, "amax")[:, :classes]


def with_neighbors(
    hits: Bool[Tensor, " batch"],
    anchors: Int[Tensor, " anchors"],
    neighbors: Int[Tensor, "anchors around"],
) -> Bool[Tensor, " anchors"]:
    """pm-k: an anchor counts if it is right and every one of its neighbors is too (-1 is none)."""
    return hits[anchors] & (hits[neighbors.clamp(min=0)] | (neighbors < 0)).all(1)


def mean_corruption_error(accuracy: Mapping[str, Sequence[float]]) -> OverCorruptions:
    """mCE (Hendrycks & Dietterich 2019): errors over AlexNet's, 1 as good as it; ImageNet-C only.

    The mean over types of (mean error of the severities) / (AlexNet's). Papers print it times 100.
    Not comparable with theirs where types are left out.
    """
    kept = _kept(accuracy)
    total = sum(
        (1 - sum(accuracy[name]) / len(accuracy[name])) / ALEXNET_ERROR[name] for name in kept
    )
    return OverCorruptions(total / len(kept), _left_out(kept))


def _kept(accuracy: Mapping[str, Sequence[float]]) -> list[str]:
    kept = [name for name in ALEXNET_ERROR if name in accuracy]
    if not kept:
        raise ValueError(f"accuracy has none of the 15 corruptions, got {', '.join(accuracy)}")
    for name in kept:
        if len(accuracy[name]) != 5 or not all(0 <= value <= 1 for value in accuracy[name]):
            values = list(accuracy[name])
            raise ValueError(f"accuracy[{name!r}] must be 5 numbers from 0 to 1, got {values}")
    return kept


def _left_out(kept: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in ALEXNET_ERROR if name not in kept)
