"""Open every split of a source."""

from compressive.data.decode import MAX_PIXELS
from compressive.data.location import ImageData
from compressive.data.source import NoSplit, Source
from compressive.data.sources import open_source

_SPLIT_ORDER = ("train", "val", "test", "unlabeled")


def open_all_splits(data: ImageData, max_pixels: int = MAX_PIXELS) -> dict[str, Source]:
    """Return the splits of a source by name, train first; a source without splits is train."""
    found: dict[str, Source] = {}
    missing: NoSplit | None = None
    for name in _SPLIT_ORDER:
        try:
            source = open_source(data, name, max_pixels=max_pixels)
        except NoSplit as error:
            missing = missing or error
            continue
        # A split may have several names: test of ImageNet is val.
        if not any(_is_same(source, other) for other in found.values()):
            found[name] = source
    if not found:
        assert missing is not None
        raise missing
    return found


def _is_same(one: Source, other: Source) -> bool:
    return len(one) == len(other) and one.origin(0) == other.origin(0)
