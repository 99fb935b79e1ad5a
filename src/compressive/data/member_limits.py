"""Limits on the names and sizes of files in an archive."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

LARGEST_MEMBER = 2**30  # bytes of one unpacked file, which is held in memory
RATIO_FROM = 2**26  # bytes; smaller files may be all of one color, which packs 1,000 times smaller
MAX_RATIO = 200


def check_member_names(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError for names outside of the archive and for names that occur twice."""
    # Nothing is extracted, so names are only labels. Such an archive is still not trustworthy.
    for name in names:
        if name.startswith("/") or re.match("[A-Za-z]:", name) or ".." in name.split("/"):
            raise ValueError(
                f"{path} has a file outside of its folder, {name}; such an archive is not opened; "
                "pack it again with relative names"
            )
    name, count = Counter(names).most_common(1)[0] if names else ("", 1)
    if count > 1:
        hint = "pack it again with one file of each name"
        raise ValueError(f"{path} has {count} files of the same name, {name}; {hint}")


def check_member_sizes(path: Path, names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError if a file is too large; sizes are unpacked and packed bytes."""
    for name, (size, packed) in zip(names, sizes, strict=True):
        if size > LARGEST_MEMBER:
            raise ValueError(
                f"{path}: {name} has {size / 2**30:,.1f} GiB unpacked, allowed is "
                f"{LARGEST_MEMBER / 2**30:g} GiB; unpack the archive and give the folder"
            )
        check_ratio(f"{path}: {name}", size, packed)


def check_ratio(place: str, size: int, packed: int) -> None:
    """Raise ValueError if data unpack to much more than images do."""
    if size > RATIO_FROM and size > MAX_RATIO * packed:
        raise ValueError(
            f"{place} unpacks to more than {MAX_RATIO} times its size ({packed:,} to {size:,} "
            "bytes), as a decompression bomb does; unpack it yourself if you trust it"
        )
