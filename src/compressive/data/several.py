"""Several sources as one: images in the order of the sources, classes merged by name."""

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressive.data.decode import MAX_PIXELS
from compressive.data.location import PYTHON, ImageData, check_distinct
from compressive.data.python_datasets import as_source, choose_part, source_name
from compressive.data.source import (
    CALLED,
    NoSplit,
    Source,
    fetch_ahead,
    pixels,
    subset,
    without_labels,
)
from compressive.rundir.places import join_places, split_places


class SourceCount(NamedTuple):
    """A row of the table of sources."""

    name: str
    images: int
    labeled: int
    classes: int  # that have an image


class CombinedSource:
    """A `Source` of several parts; labels are kept if the parts name their classes alike."""

    def __init__(self, parts: Sequence[Source], places: Sequence[str] = ()) -> None:
        self.parts: list[Source] = list(parts)
        self.places: list[str] = list(places) or [part.name for part in parts]
        names = [part.name for part in parts]
        more = f"+{len(names) - 3}" if len(names) > 3 else ""
        self.name: str = "+".join(names[:3]) + more
        self.starts: list[int] = [0, *accumulate(map(len, parts))]
        limits = [getattr(part, "max_pixels", MAX_PIXELS) for part in parts]
        self.max_pixels: int = min(limits, default=MAX_PIXELS)
        merged = _merged(self.parts, self.places)
        self.labels: Int64[Tensor, " count"] | None = merged.get("labels")
        self.classes: tuple[str, ...] | None = merged.get("classes")

    def __len__(self) -> int:
        return self.starts[-1]

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Return image i of all parts."""
        part, inside = self.find(i)
        return pixels(part, inside)

    def stored(self, i: int) -> Any:
        """Return image i as its part stores it: encoded bytes, or pixels."""
        part, inside = self.find(i)
        return getattr(part, "stored", part.image)(inside)

    def ahead(self, indices: Sequence[int]) -> None:
        """Tell the parts which images will be read soon."""
        for part, start, stop in zip(self.parts, self.starts[:-1], self.starts[1:], strict=True):
            if inside := [i - start for i in indices if start <= i < stop]:
                fetch_ahead(part, inside)

    def origin(self, i: int) -> str:
        """Return the location of image i in its part."""
        part, inside = self.find(i)
        return part.origin(inside)

    def span(self, i: int) -> tuple[str, int, int] | None:
        """Return the path, offset and size of image i in a file, or None if it is in no file."""
        part, inside = self.find(i)
        span = getattr(part, "span", None)
        is_same = getattr(part, "max_pixels", None) == self.max_pixels
        return span(inside) if span is not None and is_same else None

    def counts(self) -> list[SourceCount]:
        """Return the numbers of images and classes of each part, and of all."""
        rows = [_count_source(*pair) for pair in zip(self.places, self.parts, strict=True)]
        return [*rows, _count_source("all", self)]

    def find(self, i: int) -> tuple[Source, int]:
        """Return the part of image i, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has images 0 to {len(self) - 1}, got {i}")
        k = bisect_right(self.starts, i) - 1
        return self.parts[k], i - self.starts[k]


def drop_labels(source: Source) -> Source:
    """Return a source without its labels; keep the parts of a combined one."""
    if isinstance(source, CombinedSource):
        return CombinedSource([without_labels(part) for part in source.parts], source.places)
    return without_labels(source)


def take(source: Source, index: Int64[Tensor, " some"]) -> Source:
    """Return the images at these sorted indices; keep the parts of a combined source."""
    if not isinstance(source, CombinedSource):
        return subset(source, index)
    starts, parts = source.starts, []
    for k, part in enumerate(source.parts):
        inside = index[(index >= starts[k]) & (index < starts[k + 1])]
        parts.append(subset(part, inside - starts[k]))
    return CombinedSource(parts, source.places)


def is_path(data: ImageData) -> bool:
    """Return whether images are named by text or a path, which one source or several have."""
    if isinstance(data, list | tuple):
        return all(map(is_path, data))
    return isinstance(data, str | Path)


def place_of(data: ImageData) -> str:
    """Return images as a value of data.source; a Python object has a name that cannot be opened."""
    if isinstance(data, list | tuple):
        if not data:
            raise ValueError("the list of sources is empty; give one or more")
        return join_places(map(place_of, data))
    return str(data) if is_path(data) else f"{PYTHON}{source_name(data)}"


def named_place(data: ImageData) -> str:
    """Return images as text that another process can open; raise ValueError for objects."""
    if not is_path(data):
        raise ValueError("on a cluster, images must be named by a path or an address")
    return place_of(data)


def open_objects(
    data: ImageData, split: str, open_one: Callable[[ImageData, str], Source]
) -> Source:
    """Open Python objects, a dict of splits, or several sources as one."""
    if isinstance(data, str):
        data = split_places(data)
    if isinstance(data, Mapping):
        return open_one(choose_part(data, split), "train")
    if not isinstance(data, list | tuple):
        return as_source(data, split)
    return open_one(data[0], split) if len(data) == 1 else _combine(data, split, open_one)


def _combine(
    data: Sequence[ImageData], split: str, open_one: Callable[[ImageData, str], Source]
) -> Source:
    """Open a split of several sources; leave out those that lack it, unless it is train."""
    places = [place_of(each) for each in data]
    check_distinct([place for place in places if not place.startswith(PYTHON)])
    if len({id(each) for each in data}) < len(data):
        raise ValueError("a list of sources has the same object twice; give each source once")
    parts: list[Source] = []
    used, lacking = [], []  # places
    for each, place in zip(data, places, strict=True):  # objects may have equal names
        try:
            parts.append(_open_part(each, split, open_one))
            used.append(place)
        except NoSplit:
            if split in CALLED["train"]:
                raise
            lacking.append(place)
    if not parts:
        raise NoSplit(f"{' and '.join(places)} have no split {split!r}")
    if lacking:
        note = f"split {split} has images of {' and '.join(used)} only"
        warnings.warn(f"{note}; {' and '.join(lacking)} has no such split", stacklevel=1)
    return CombinedSource(parts, used)


def _open_part(data: ImageData, split: str, open_one: Callable[[ImageData, str], Source]) -> Source:
    """Open a split of one of several sources; a single file is not its own test split."""
    found = open_one(data, split)
    if split not in CALLED["train"]:
        train = open_one(data, "train")
        if train.origin(0) == found.origin(0) and len(train) == len(found):
            raise NoSplit(f"{place_of(data)} has no split {split!r}; it is a single file")
    return found


def count_table(source: Source) -> list[str]:
    """Return a table of the images of each part of a combined source; [] for other sources."""
    if not isinstance(source, CombinedSource):
        return []
    head = ("source", "images", "labeled", "classes")
    rows = [head, *((r.name, *(f"{n:,}" for n in r[1:])) for r in source.counts())]
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    lines = []
    for name, *numbers in rows:
        cells = [number.rjust(widths[k]) for k, number in enumerate(numbers, start=1)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return lines


def split_tables(splits: Mapping[str, Source]) -> list[str]:
    """Return the tables of the splits of a combined source; [] for other sources."""
    tables = {name: count_table(source) for name, source in splits.items()}
    return [line for name, rows in tables.items() if rows for line in (f"split {name}:", *rows)]


def _count_source(name: str, source: Source) -> SourceCount:
    labels = torch.empty(0) if source.labels is None else source.labels
    known = labels[labels >= 0]
    return SourceCount(name, len(source), len(known), len(known.unique()))


def _merged(parts: Sequence[Source], places: Sequence[str]) -> dict[str, Any]:
    """Return labels and classes of all parts; images of an unlabeled part have none."""
    # Names are compared, not numbers: class 0 of one source may be class 1 of another. Numbers as
    # names next to words cannot be compared, so labels are left out.
    named = [part.classes for part in parts if part.classes is not None]
    if not named:
        return {}
    numbered = [all(re.fullmatch(r"\d+", name) for name in names) for names in named]
    if any(numbered) and not all(numbered):
        has_names = [place for place, part in zip(places, parts, strict=True) if part.classes]
        by_kind = [has_names[numbered.index(kind)] for kind in (True, False)]
        warnings.warn(
            f"labels are left out: classes of {by_kind[0]} have numbers and those of "
            f"{by_kind[1]} names",
            stacklevel=1,
        )
        return {}
    every = tuple(dict.fromkeys(name for names in named for name in names))
    ids = {name: i for i, name in enumerate(every)}
    labels = []
    for part in parts:
        own = torch.full((len(part),), -1)
        if part.labels is not None and part.classes is not None:
            number = torch.tensor([ids[name] for name in part.classes])
            own = torch.where(part.labels < 0, -1, number[part.labels.clamp(min=0)])
        labels.append(own)
    return {"labels": torch.cat(labels), "classes": every}
