"""Correct answers of a test set: class ids per image, allowed ids, video frames."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class GroundTruth:
    """Correct answers for logits over the classes of a classifier.

    Video sets have their own classes: `owner` maps ImageNet ids to them, and `right` holds them.
    """

    classes: int  # number of logits per image
    right: Int64[Tensor, "images most"]  # any of these is correct; rows are padded with -1
    allowed: Int64[Tensor, " some"] | None = None  # classes of a masked argmax; None: all
    owner: Int64[Tensor, " ids"] | None = None  # video class of each ImageNet id, -1: none
    video_classes: int = 0
    anchors: Int64[Tensor, " anchors"] | None = None  # frames in the middle of their set
    neighbors: Int64[Tensor, "anchors around"] | None = None  # frames around each, -1: none

    def __post_init__(self) -> None:
        assert (self.owner is None) == (self.anchors is None) == (self.neighbors is None)
        assert bool(len(self.right)), "no images"
        assert int(self.right.max()) < (self.video_classes or self.classes), "no such class"
        assert bool((self.right >= 0).any(1).all()), "an image without a right answer"

    def to(self, device: torch.device | str) -> "GroundTruth":
        """Move all tensors to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if torch.is_tensor(v)}
        return replace(self, **moved)


def padded(rows: Sequence[Collection[int]]) -> Int64[Tensor, "rows most"]:
    """Return sets of different sizes as one table: sorted rows, padded with -1."""
    most = max(map(len, rows), default=0)
    return torch.tensor(
        [sorted(row) + [-1] * (most - len(row)) for row in rows], dtype=torch.int64
    ).reshape(len(rows), most)
