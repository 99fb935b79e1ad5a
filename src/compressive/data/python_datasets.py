"""Python objects as sources: torch data sets, Hugging Face's data sets, arrays and mappings."""

import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from compressive.data.dataset_items import IMAGE_KEYS, ItemError, item_image, item_label
from compressive.data.decode import Unreadable, decode, first_line
from compressive.data.saved_datasets import encoded_cell
from compressive.data.shard_file import LABEL_NAMES
from compressive.data.source import ImageSource, Source, choose_split, labeled, read_file

_ALLOWED = (
    "a map-style torch Dataset, datasets.Dataset or DatasetDict, a dict of them by split, a Source,"
    " a path, or a list of these"
)
_TARGETS = ("targets", "labels", "_labels", "y")


def source_name(data: object) -> str:
    """Return the name of a Python object of images, as it appears in data.source."""
    if isinstance(data, Source):
        return data.name
    if isinstance(data, Mapping):
        data = next(iter(data.values()), data)
    for attribute in ("dataset_name", "builder_name"):
        if name := getattr(getattr(data, "info", None), attribute, None):
            return str(name)
    return type(data).__name__


def as_source(data: object, split: str) -> Source:
    """Return a Python object as a source; raise ValueError if it does not hold images."""
    if isinstance(data, Source):
        choose_split(split, ["train"], data.name)
        return data
    _require_map_style(data)
    choose_split(split, ["train"], source_name(data))
    if (hugging_face := _hugging_face(data)) is not None:
        return hugging_face
    if (folder := _image_folder(data)) is not None:
        return folder
    return DatasetSource(data)


def choose_part(data: Mapping[Any, Any], split: str) -> Any:
    """Return the images of a split in a dict such as `datasets.DatasetDict`."""
    if not data or not all(isinstance(key, str) for key in data):
        raise ValueError(f"a dict of images must have names of splits as keys; allowed: {_ALLOWED}")
    return data[choose_split(split, data, source_name(data))]


def _require_map_style(data: object) -> None:
    """Raise ValueError for objects without random access."""
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise ValueError(f"images are a {kind}; give its data set: loader.dataset")
    is_iterable = isinstance(data, IterableDataset) or "Iterable" in kind
    has_access = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_iterable or not has_access or isinstance(data, bytes | str | Path):
        why = "can only be read in order" if is_iterable else "has no images by index"
        raise ValueError(f"images are a {kind}, which {why}; allowed: {_ALLOWED}")
    try:
        count = len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"the length of {kind} is unknown: {first_line(error)}") from None
    if not count:
        raise ValueError(f"the data set {kind} is empty")


def _hugging_face(data: Any) -> Source | None:
    """Return a `datasets.Dataset` with a column of images as a source, else None."""
    # The library is imported if there is an object of it. A module of a user may have its name.
    datasets: Any = sys.modules.get("datasets")
    kind = getattr(datasets, "Dataset", None)
    if not isinstance(kind, type) or not isinstance(data, kind) or not hasattr(data, "features"):
        return None
    images = [n for n, feature in data.features.items() if isinstance(feature, datasets.Image)]
    if not images:
        return None  # arrays are read as items
    image = next((name for name in IMAGE_KEYS if name in images), images[0])
    label = next((name for name in LABEL_NAMES if name in data.features), None)
    # Without its format and transform: bytes are decoded here, as those of files are.
    cells = data.with_format(None).select_columns([image])
    cells = cells.cast_column(image, datasets.Image(decode=False))
    values: list[Any] = []
    if label is not None:
        column = data.with_format("arrow", columns=[label])[:]
        values = column[label].to_pylist()
    name = source_name(data)
    names = getattr(data.features.get(label), "names", None) if label else None
    return ImageSource(
        name=name,
        count=len(data),
        read=lambda i: encoded_cell(cells[i][image]),
        place=lambda i: f"{name}:{i}",
        **labeled(values, names),
    )


def _image_folder(data: Any) -> Source | None:
    """Return a torchvision `ImageFolder` without transforms as a source of files, else None."""
    from torchvision import datasets

    if not isinstance(data, datasets.ImageFolder):
        return None
    is_plain = data.loader is datasets.folder.default_loader
    if not is_plain or data.transform is not None or data.target_transform is not None:
        return None
    files = [path for path, _ in data.samples]
    return ImageSource(
        name=Path(data.root).resolve().name,
        count=len(files),
        read=lambda i: read_file(files[i]),
        place=lambda i: files[i],
        span=lambda i: (files[i], 0, -1),
        root=str(data.root),
        **labeled(data.targets, data.classes),
    )


class DatasetSource:
    """A map-style data set as a `Source`; labels are read when they are first used."""

    def __init__(self, data: Any) -> None:
        self.data: Any = data
        self.name: str = source_name(data)
        # Nothing says that threads may share a data set, because loaders use processes. Those of
        # torchvision and tensors in memory may be shared.
        is_shareable = isinstance(data, TensorDataset | Tensor) or _package(data) == "torchvision"
        self._lock: Any = nullcontext() if is_shareable else threading.Lock()
        self.has_labels: bool = self._check_items()

    def __len__(self) -> int:
        return len(self.data)

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Return image i; raise `Unreadable` if the data set raises an error."""
        try:
            with self._lock:  # an item may be an image that is not loaded yet
                found = item_image(self.data[i])
            return decode(found) if isinstance(found, bytes) else found
        except Unreadable:
            raise
        except ItemError as error:
            raise Unreadable(f"it {error}") from None
        except Exception as error:  # data sets raise errors of any type
            raise Unreadable(f"{type(error).__name__}: {first_line(error)}") from error

    def origin(self, i: int) -> str:
        """Return NAME:INDEX."""
        return f"{self.name}:{i}"

    @property
    def labels(self) -> Int64[Tensor, " count"] | None:
        """Class of each image, -1 if it has none."""
        return self._labeled.get("labels")

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes."""
        return self._labeled.get("classes")

    @cached_property
    def _labeled(self) -> dict[str, Any]:
        """Labels and classes, from an attribute of the data set or else from all items."""
        if not self.has_labels:
            return {}
        places = _checked_items(len(self))
        values = known_targets(self.data)
        if values is not None:
            read = [self._label(i) for i in places]
            if not all(_same(values[i], label) for i, label in zip(places, read, strict=True)):
                values = None  # changed by a transform
        if values is None:
            values = [self._label(i) for i in range(len(self))]
        return labeled([_plain(value) for value in values], known_classes(self.data))

    def _item(self, i: int) -> Any:
        with self._lock:
            return self.data[i]

    def _label(self, i: int) -> Any:
        """Return the label of item i, or None if the item cannot be read."""
        try:
            return item_label(self._item(i))
        except Exception:
            return None

    def _check_items(self) -> bool:
        """Raise ValueError if items are no images or random; return whether they have labels."""
        has_labels, failed, count = False, "", 0
        for i in _checked_items(len(self)):
            place = f"item {i} of {self.name}"
            try:
                item = self._item(i)
                first, label = item_image(item), item_label(item)
                again = item_image(self._item(i))
            except ItemError as error:
                raise ValueError(f"{place} {error}") from None
            except Exception as error:  # a single one is listed as unreadable when it is reached
                failed = failed or f"{place} cannot be read: {type(error).__name__}: {error}"
                continue
            count += 1
            if not _equal(first, again):
                raise ValueError(
                    f"{place} differs when it is read twice, so a run could not be resumed; remove "
                    "random transforms, because views are drawn during training"
                )
            has_labels |= label is not None
        if not count:
            raise ValueError(failed.split("\n")[0])
        return has_labels


def known_targets(data: Any) -> list[Any] | None:
    """Return the label of each item if the data set knows them without reading images."""
    if isinstance(data, Subset):
        whole = known_targets(data.dataset)
        return None if whole is None else [whole[i] for i in data.indices]
    if isinstance(data, ConcatDataset):
        parts = [known_targets(part) for part in data.datasets]
        return None if None in parts else [v for part in parts for v in part or ()]
    if isinstance(data, TensorDataset):
        return data.tensors[1].tolist() if len(data.tensors) > 1 else None
    for values in (getattr(data, name, None) for name in _TARGETS):
        if isinstance(values, Tensor | np.ndarray):
            values = values.tolist() if values.ndim == 1 else None
        if isinstance(values, list | tuple) and len(values) == len(data):
            return list(values)
    return None


def known_classes(data: Any) -> list[str] | None:
    """Return the names of the classes of a data set, or None."""
    if isinstance(data, Subset):
        return known_classes(data.dataset)
    if isinstance(data, ConcatDataset):
        found = [known_classes(part) for part in data.datasets]
        return found[0] if all(names == found[0] for names in found) else None
    names = getattr(data, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str | tuple) for name in names):
        return [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]
    return None


def _package(data: object) -> str:
    return type(data).__module__.partition(".")[0]


def _checked_items(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _plain(value: Any) -> Any:
    """Return a number of torch or NumPy as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(_plain(one) == _plain(other))
    except (RuntimeError, ValueError):  # vectors
        return False


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other
