"""What counts as right in a test set: per image several class ids, ids to choose among, frames."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class GroundTruth:
    """All that is needed to judge logits over the classes that a classifier was trained on.

    Sets of videos have classes of their own. `owner` leads there: `right` then holds video classes.
    """

    classes: int  # as many logits has an image
    right: Int64[Tensor, "images most"]  # any of these is a hit; rows are filled up with -1
    allowed: Int64[Tensor, " some"] | None = None  # what a masked argmax chooses among; None: all
    owner: Int64[Tensor, " ids"] | None = None  # the video class of each ImageNet id, -1 for none
    video_classes: int = 0
    anchors: Int64[Tensor, " anchors"] | None = None  # frames in the middle of their set
    neighbors: Int64[Tensor, "anchors around"] | None = None  # the frames about each, -1 for none

    def __post_init__(self) -> None:
        assert (self.owner is None) == (self.anchors is None) == (self.neighbors is None)
        assert bool(len(self.right)), "no images"
        assert int(self.right.max()) < (self.video_classes or self.classes), "no such class"
        assert bool((self.right >= 0).any(1).all()), "an image without a right answer"

    def to(self, device: torch.device | str) -> "GroundTruth":
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if torch.is_tensor(v)}
        return replace(self, **moved)


def padded(rows: Sequence[Collection[int]]) -> Int64[Tensor, "rows most"]:
    """Sets of different sizes as one table: each row sorted, filled up with -1."""
    most = max(map(len, rows), default=0)
    return torch.tensor(
        [sorted(row) + [-1] * (most - len(row)) for row in rows], dtype=torch.int64
    ).reshape(len(rows), most)
