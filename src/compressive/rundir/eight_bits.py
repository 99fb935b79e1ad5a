"""Convert kernels to 8 bits per weight with a scale per output channel, and back, without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE_SUFFIX = ".int8_scale"
_INT8_RANGE = 127  # -128 is not used, so that the values are symmetric


def to_int8(value: NDArray[Any], name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round to multiples of a scale per output channel; return the integers and the scales.

    The largest value of each channel becomes 127 or -127. Scales with less squared error, which
    clip it, do not bring the features of a trained ResNet-18 closer.
    """
    rows = value.reshape(len(value), -1).astype(np.float64)
    largest = np.abs(rows).max(1)
    # Use `not`, so that NaN fails too. A channel of zeros has scale 0.
    if not ((largest > 1e-28) & (largest < 1e32) | (largest == 0)).all():
        raise ValueError(
            f"{name} does not fit 8 bits: the largest value of a channel must be 1e-28 to 1e32, "
            f"and the largest of all is {largest.max():.3g}; keep the encoder in float32"
        )
    # Round the scales first: the integers must fit the scales that are stored.
    scales = (largest / _INT8_RANGE).astype(np.float32)
    steps = np.where(scales == 0, 1, scales)[:, None]
    integers = np.clip(np.rint(rows / steps), -_INT8_RANGE, _INT8_RANGE)
    return integers.astype(np.int8).reshape(value.shape), scales


def from_int8(stored: Mapping[str, NDArray[Any]], path: Path) -> dict[str, NDArray[Any]]:
    """Return float32 weights for integers and their scales, and other arrays as they are."""
    weights = {}
    for name, value in stored.items():
        if name.endswith(SCALE_SUFFIX):
            integers = stored.get(name.removesuffix(SCALE_SUFFIX))
            if integers is None or integers.dtype != np.int8:
                raise ValueError(f"{path} is damaged: {name} has no weights with 8 bits")
        elif value.dtype == np.int8:
            weights[name] = _scaled(value, stored.get(name + SCALE_SUFFIX), f"{name} of {path}")
        else:
            weights[name] = value
    return weights


def _scaled(value: NDArray[Any], scales: NDArray[Any] | None, name: str) -> NDArray[Any]:
    if scales is None or (scales.dtype, scales.shape) != (np.float32, value.shape[:1]):
        raise ValueError(f"{name} is damaged: it needs one float32 scale per output channel")
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise ValueError(f"{name} is damaged: its scales must be finite and at least 0")
    return value.astype(np.float32) * scales.reshape(-1, *[1] * (value.ndim - 1))
