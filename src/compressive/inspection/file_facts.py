"""Tables of the files: splits, classes, formats, sizes and aspect ratios."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compressive.inspection.scan import Scan

_MOST = 12  # rows of a table; the rest is one row
_ASPECTS = (  # width / height up to this value
    (0.5, "taller than 2 : 1"),
    (0.8, "portrait"),
    (1.25, "about square"),
    (2.0, "landscape"),
    (np.inf, "wider than 2 : 1"),
)


class Bars(NamedTuple):
    """A table of counts; each row has one count per column."""

    title: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[int]]]
    note: str = ""

    @property
    def most(self) -> int:
        """The largest count, which has the longest bar."""
        return max((n for _, counts in self.rows for n in counts), default=1) or 1


def file_tables(scan: Scan) -> list[Bars]:
    """Return all tables that have content."""
    tables = [_classes(scan), _formats(scan), _sizes(scan), _aspects(scan), _file_sizes(scan)]
    return [table for table in tables if table is not None]


def _classes(scan: Scan) -> Bars | None:
    if not scan.classes:
        return None
    names = [*scan.classes, "no label"]
    counts = np.zeros((len(names), len(scan.splits)), np.int64)
    np.add.at(counts, (scan.label, scan.split), 1)  # label -1 is the last row
    rows = [(name, row.tolist()) for name, row in zip(names, counts, strict=True)]
    if not any(rows[-1][1]):
        rows.pop()
    note = ""
    if len(rows) > 2 * _MOST:
        by_count = sorted(rows, key=lambda row: -sum(row[1]))
        note = f"the {_MOST} largest and the {_MOST} smallest of {len(rows):,} classes"
        rows = by_count[:_MOST] + by_count[-_MOST:]
    return Bars("Classes", [split.name for split in scan.splits], rows, note)


def _formats(scan: Scan) -> Bars | None:
    return _most_frequent("Formats", Counter(kind for kind in scan.kind if kind))


def _sizes(scan: Scan) -> Bars | None:
    pairs = zip(
        scan.width[scan.readable].tolist(), scan.height[scan.readable].tolist(), strict=True
    )
    counts = Counter(pairs)
    if not counts:
        return None
    named = Counter({f"{w} x {h}": n for (w, h), n in counts.items()})
    made = _most_frequent("Sizes, width x height", named)
    sides = np.minimum(scan.width, scan.height)[scan.readable]
    note = (
        f"shorter side: {sides.min():,} to {sides.max():,} pixels, median {np.median(sides):,.0f}"
    )
    return made and made._replace(note=note)


def _aspects(scan: Scan) -> Bars | None:
    ratio = scan.width[scan.readable] / scan.height[scan.readable]
    bins = np.searchsorted([limit for limit, _ in _ASPECTS], ratio)
    counts = np.bincount(bins, minlength=len(_ASPECTS)).tolist()
    rows = [(name, [n]) for (_, name), n in zip(_ASPECTS, counts, strict=True) if n]
    return (
        Bars("Aspect ratios", [""], rows, "width / height; square: 0.8 to 1.25") if rows else None
    )


def _file_sizes(scan: Scan) -> Bars | None:
    known = scan.size[scan.size > 0]
    if not len(known):
        return None
    powers = np.floor(np.log2(known / 1024)).astype(int).clip(-1)
    rows = []
    for power, count in sorted(Counter(powers.tolist()).items()):
        low, high = (_bytes_text(1024 * 2.0**p) for p in (power, power + 1))
        rows.append((f"below {high}" if power < 0 else f"{low} to {high}", [count]))
    return Bars("File sizes", [""], rows, f"{_bytes_text(float(known.sum()))} in total")


def _bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _most_frequent(title: str, counts: Counter[str]) -> Bars | None:
    """Return the most frequent values, and one row for the others."""
    if not counts:
        return None
    rows = [(name, [n]) for name, n in counts.most_common(_MOST)]
    if rest := counts.total() - sum(n for _, (n,) in rows):
        rows.append((f"{len(counts) - _MOST:,} others", [rest]))
    return Bars(title, [""], rows)
