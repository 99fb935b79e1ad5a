"""The `Source` protocol: images by index, labels, classes; and the names of splits."""

import errno
import math
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int, Int64, UInt8
from torch import Tensor

from compressive.data.decode import MAX_PIXELS, Unreadable, decode, shrink
from compressive.platforms.files import open_without_waiting
from compressive.storage.backend import StorageError

__all__ = ["ImageSource", "NoSplit", "Source", "subset"]

# Ids that are at least this and the number of images are not class numbers.
MOST_CLASSES = 100_000
_VAL = ("val", "valid", "validation", "dev")
# Names of a split, in the order of search. ImageNet is tested on val, so test may be called val.
# The reverse would select models on test images.
CALLED: dict[str, tuple[str, ...]] = {
    "train": ("train", "training", "trainval", "train-standard"),
    "test": ("test", "testing", *_VAL),
    **{name: (name, *_VAL) for name in _VAL},
}
SPLITS = frozenset(("train", "training", "test", "testing", "unlabeled", *_VAL))
# Temporary errors of a network disk, or of too many open files, and the waits before retries.
_NETWORK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN)
_NETWORK += (errno.ENOTCONN, errno.EHOSTUNREACH, errno.ENETUNREACH)
_PASSING = frozenset((*_NETWORK, errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENFILE))
_WAITS = (0.1, 1.0)  # seconds
_OUTAGE_WAITS = (*_WAITS, 2.0, 4.0, 8.0, 16.0)  # while the folder of all images is unavailable


class NoSplit(ValueError):
    """Raised if a source lacks a split; the message lists the splits it has."""


class DataUnavailable(OSError):
    """Raised if the folder of all images is unavailable; no single image is at fault."""


@runtime_checkable
class Source(Protocol):
    """Images by index, with optional labels; many threads may read at once."""

    @property
    def name(self) -> str:
        """Name of the source."""
        ...

    @property
    def labels(self) -> Int64[Tensor, " count"] | None:
        """Class of each image, -1 if it has none."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None only if `labels` is None."""
        ...

    def __len__(self) -> int: ...

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Return image i, upright, in RGB, read-only; raise `Unreadable` if it is damaged."""
        ...

    def origin(self, i: int) -> str:
        """Return the location of image i: a file, or a shard and a place in it."""
        ...


def require_source(source: object) -> Source:
    """Raise ValueError if this is not a `Source`, as far as known without reading an image."""
    if not isinstance(source, Source):
        parts, got = "name, labels, classes, len, image(i) and origin(i)", type(source).__name__
        raise ValueError(f"a source must have {parts}, got {got}")
    labels: object = source.labels
    if labels is None:
        return source
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        rule = f"be an int64 tensor or None, got {kind}"
    elif labels.shape != (len(source),):
        rule = f"have shape ({len(source)},), got {tuple(labels.shape)}"
    elif len(labels) and (most := int(labels.max())) >= max(len(source), MOST_CLASSES):
        rule = f"be class numbers from 0, got {most} for {len(source):,} images; renumber them"
    else:
        return source
    raise ValueError(f"labels of {source.name} must {rule}")


def pixels(source: Source, i: int) -> UInt8[Tensor, "3 h w"]:
    """Return image i of any source; raise ValueError if it has a wrong type or shape."""
    image: object = source.image(i)
    if not isinstance(image, Tensor):
        got = type(image).__name__
    elif image.dtype == torch.uint8 and image.ndim == 3 and len(image) == 3:
        return image
    else:
        got = f"{image.dtype} of shape {tuple(image.shape)}"
    rule = "an image must be a uint8 tensor of shape (3, h, w)"
    raise ValueError(f"{source.origin(i)}: {rule}, got {got}")


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSource:
    """A `Source` from a function that reads image i as encoded bytes or as pixels."""

    name: str
    count: int
    read: Callable[[int], Any]  # bytes, or UInt8[Tensor, "3 h w"]
    place: Callable[[int], str]
    labels: Int64[Tensor, " count"] | None = None
    classes: tuple[str, ...] | None = None
    root: str = ""  # folder or file that holds all images, if they are on a disk
    max_pixels: int = MAX_PIXELS
    # Called with the images that will be read soon, for sources that take long to read.
    ahead: Callable[[Sequence[int]], None] | None = None
    # Path, offset and size of an encoded image in a file, so that another process can read it.
    span: Callable[[int], tuple[str, int, int]] | None = None

    def __post_init__(self) -> None:
        assert (self.labels is None) == (self.classes is None)
        assert self.labels is None or len(self.labels) == self.count

    def __len__(self) -> int:
        return self.count

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Return image i, upright, in RGB, read-only; raise `Unreadable` if it is damaged."""
        found = self.stored(i)
        return found if isinstance(found, Tensor) else decode(found, self.max_pixels)

    def stored(self, i: int) -> Any:
        """Return image i as it is stored: encoded bytes, or pixels."""
        try:
            return _read_with_retries(self.read, self._checked(i), self.root)
        except (DataUnavailable, StorageError):
            raise
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error

    def origin(self, i: int) -> str:
        """Return the location of image i: a file, or a shard and a place in it."""
        return self.place(self._checked(i))

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.count:
            raise IndexError(f"{self.name} has images 0 to {self.count - 1}, got {i}")
        return i


def _read_with_retries(read: Callable[[int], Any], i: int, root: str) -> Any:
    """Read image i; retry after temporary errors, and longer while `root` is unavailable."""
    for tried, wait in enumerate((*_OUTAGE_WAITS, None)):
        try:
            return read(i)
        except (DataUnavailable, StorageError):
            raise
        except OSError as error:
            is_away = _is_away(root)
            if not is_away and (tried >= len(_WAITS) or error.errno not in _PASSING):
                raise
            if wait is None:
                waited = f"{root} has been unavailable for {sum(_OUTAGE_WAITS):.0f} seconds"
                hint = "when it is back, run the same command to resume"
                raise DataUnavailable(error.errno, f"{waited} ({error.strerror}); {hint}") from None
            time.sleep(wait)
    raise AssertionError


def _is_away(root: str) -> bool:
    """Return whether a folder is missing, unreadable or empty, like an unmounted one."""
    if not root:
        return False
    try:
        with os.scandir(root) as entries:
            return next(entries, None) is None
    except NotADirectoryError:  # a single shard, which exists
        return False
    except OSError:
        return True


def fetch_ahead(source: Source, indices: Sequence[int]) -> None:
    """Tell a source which images will be read soon."""
    if (ahead := getattr(source, "ahead", None)) is not None:
        ahead(indices)


def with_max_pixels(source: Source, most: int) -> Source:
    """Return the source with another limit, if it is an `ImageSource`; else unchanged."""
    return replace(source, max_pixels=most) if isinstance(source, ImageSource) else source


def without_labels(source: Source) -> Source:
    """Return the same images without their labels."""
    if isinstance(source, ImageSource):
        return replace(source, labels=None, classes=None)
    read, place = source.image, source.origin
    return ImageSource(name=source.name, count=len(source), read=read, place=place)


def subset(source: Source, index: Int[Tensor, " some"]) -> Source:
    """Return the images of a source at these indices, in this order, with unchanged class ids."""
    whole, own = index.tolist(), source if isinstance(source, ImageSource) else None
    read = source.image if own is None else own.stored  # keep encoded images encoded
    span = None if own is None else own.span
    if whole and not 0 <= min(whole) <= max(whole) < len(source):
        allowed = f"0 to {len(source) - 1}, the images of {source.name}"
        raise ValueError(f"index must be in {allowed}, got {min(whole)} to {max(whole)}")
    return ImageSource(
        name=source.name,
        count=len(whole),
        read=lambda i: read(whole[i]),
        place=lambda i: source.origin(whole[i]),
        max_pixels=MAX_PIXELS if own is None else own.max_pixels,
        ahead=lambda indices: fetch_ahead(source, [whole[i] for i in indices]),
        span=None if span is None else lambda i: span(whole[i]),
        labels=None if source.labels is None else source.labels[index],
        classes=source.classes,
    )


def shrunk(source: Source, side: int, least: int, most: int) -> Source:
    """Return a source whose images are resized by `shrink`."""
    return ImageSource(
        name=source.name,
        count=len(source),
        read=lambda i: shrink(source.image(i), side, least, most),
        place=source.origin,
        labels=source.labels,
        classes=source.classes,
        ahead=lambda indices: fetch_ahead(source, indices),
    )


def labeled(values: Sequence[Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return labels and classes of `ImageSource` from ids or names; None means no label."""
    # Ids below 0 mean no label. Ids too large for class numbers are used as names. If a value is
    # neither id nor name (a list, a fraction), all labels are left out, with a warning.
    try:
        values = [_label(value) for value in values]
    except ValueError as error:
        warnings.warn(f"labels are left out: {error}", stacklevel=1)
        return {}
    if all(value is None for value in values):
        return {}
    is_words = any(isinstance(value, str) for value in values)
    largest = max((value for value in values if isinstance(value, int)), default=0)
    if names and largest >= len(names):
        names = None  # they do not name every id; a damaged id may be huge
    if is_words or (not names and largest >= max(len(values), MOST_CLASSES)):
        there = {value for value in values if value is not None}
        names = sorted({str(value) for value in there}) if is_words else [*map(str, sorted(there))]
        ids = {name: i for i, name in enumerate(names)}
        values = [None if value is None else ids[str(value)] for value in values]
    labels = torch.tensor([-1 if value is None else value for value in values])
    if not names:
        names = [str(i) for i in range(int(labels.max()) + 1)]
    return {"labels": labels, "classes": tuple(names)}


def _label(value: Any) -> int | str | None:
    """Return an id, a name, or None for no label; tables with gaps hold ids as 3.0 or NaN."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return whole if (whole := int(value)) >= 0 else None
    number = float(value) if isinstance(value, Real) else math.inf
    if math.isinf(number) or (not math.isnan(number) and number != int(number)):
        raise ValueError(f"a class must be a whole number or a string, got {str(value)[:40]!r}")
    return int(number) if number >= 0 else None


def choose_split(split: str, there: Iterable[str], place: str | Path) -> str:
    """Return which of the names in `there` is this split; raise `NoSplit` if none is."""
    own = {name.lower(): name for name in there}
    for name in CALLED.get(split, (split,)):
        if name.lower() in own:
            return own[name.lower()]
    raise NoSplit(f"{place} has no split {split!r}; there are: {', '.join(sorted(own.values()))}")


def read_file(path: str) -> bytes:
    """Return the bytes of a file; raise `Unreadable` for a pipe or device, which may not end."""
    with open(open_without_waiting(path), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Unreadable("not a regular file")
        return file.read()
