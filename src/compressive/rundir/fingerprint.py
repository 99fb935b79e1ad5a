"""Identify the weights of an encoder, in memory or in a safetensors file, without torch."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from compressive.rundir.eight_bits import from_int8


def weights_fingerprint(weights: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return a hash of names, shapes and values, with the tensors in any order."""
    # Float16 counts as the float32 that `encoder.load` converts it to.
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(weights, key=lambda pair: pair[0]):
        digest.update(f"{name} {value.shape} ".encode())
        kept = value.astype(np.float32) if value.dtype == np.float16 else value
        digest.update(np.ascontiguousarray(kept).tobytes())
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Return the fingerprint of the weights in a safetensors file."""
    with safe_open(path, "np") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights_fingerprint(from_int8(stored, path).items())
