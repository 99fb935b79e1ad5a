"""Image and label of an item of a data set: PIL images, tensors, arrays, pairs and dicts."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from compressive.data.decode import rgb
from compressive.data.saved_datasets import encoded_cell
from compressive.data.shard_file import LABEL_NAMES
from compressive.data.source import read_file

IMAGE_KEYS = ("image", "img", "pixel_values", "images", "x")
_LABEL_KEYS = (*LABEL_NAMES, "y")
_CHANNELS = (1, 3, 4)
_FORMS = (
    "an image is a PIL image, a uint8 array, a float array from 0 to 1, encoded bytes or a path"
)


class ItemError(ValueError):
    """Raised if an item holds no image; the message says what it holds."""


def item_image(item: Any) -> UInt8[Tensor, "3 h w"] | bytes:
    """Return the image of an item as pixels or as the bytes of an image file."""
    if isinstance(item, dict) and "bytes" not in item:
        key = next((name for name in IMAGE_KEYS if name in item), None)
        if key is None:
            raise ItemError(
                f"is a dict with {', '.join(map(str, item)) or 'no entries'}; the image must be "
                f"in one of {', '.join(IMAGE_KEYS)}"
            )
        item = item[key]
    elif isinstance(item, tuple | list):
        if not item:
            raise ItemError(f"is an empty {type(item).__name__}; {_FORMS}")
        item = item[0]
    if isinstance(item, Image.Image):
        return rgb(item)
    if isinstance(item, Tensor | np.ndarray):
        return _pixels(item)
    if isinstance(item, str | Path):
        return read_file(str(item))
    if isinstance(item, bytes | dict):
        return encoded_cell(item)
    raise ItemError(f"holds {_describe(item)}; {_FORMS}")


def item_label(item: Any) -> Any:
    """Return the label of an item, or None."""
    if isinstance(item, dict):
        return next((item[name] for name in _LABEL_KEYS if name in item), None)
    return item[1] if isinstance(item, tuple | list) and len(item) > 1 else None


def _pixels(array: Any) -> UInt8[Tensor, "3 h w"]:
    """Convert an array of pixels; numbers of type float are 0 to 1, those of 16 bits keep 8."""
    # Torch puts channels first and NumPy last, so each order is tried first for its own arrays.
    is_tensor = isinstance(array, Tensor)
    # torch.from_numpy does not take arrays with negative strides, such as flipped ones.
    found = array.detach().cpu() if is_tensor else torch.from_numpy(np.ascontiguousarray(array))
    if found.ndim == 2:
        found = found[None]
    orders = (0, 2) if is_tensor else (2, 0)
    axis = next((k for k in orders if found.ndim == 3 and found.shape[k] in _CHANNELS), None)
    if axis is None or not found.numel():
        raise ItemError(
            f"has the shape {tuple(array.shape)}; pixels are (height, width), or with 1, 3 or 4 "
            "channels as the first or last axis"
        )
    found = _as_bytes(found.movedim(axis, 0))
    return found.expand(3, -1, -1) if len(found) == 1 else found[:3]


def _as_bytes(values: Tensor) -> Tensor:
    if values.dtype == torch.uint8:
        return values
    if values.dtype == torch.uint16:
        return (values.int() >> 8).to(torch.uint8)
    if not values.is_floating_point():
        raise ItemError(f"has pixels of type {_name(values)}; {_FORMS}")
    low, high = (float(v) for v in values.float().aminmax())
    if not (low >= 0 and high <= 1):
        raise ItemError(
            f"has {_name(values)} pixels from {low:.3g} to {high:.3g}; those of type float must be "
            "from 0 to 1; remove Normalize, because views are normalized during training"
        )
    return (values.float() * 255).round().to(torch.uint8)


def _name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _describe(item: Any) -> str:
    return "None" if item is None else f"a value of type {type(item).__name__}"
