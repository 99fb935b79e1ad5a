"""Checksums of arrays and text, because safetensors detects only a wrong file size."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Key in the metadata of a safetensors file. It must be unique among programs.
CHECKSUM_KEY = "compressive_crc32"


def checksum(text: str, arrays: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a text and of the names, types, shapes and values of arrays.

    Arrays are torch tensors or, to avoid importing torch, NumPy arrays. The checksums of both
    differ.
    """
    crc = zlib.crc32(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        crc = zlib.crc32(f"{name} {array.dtype} {tuple(array.shape)}".encode(), crc)
        crc = zlib.crc32(_content(array).data, crc)
    return str(crc)


def file_checksum(metadata: Mapping[str, str], arrays: Mapping[str, Any]) -> str:
    """Return the checksum for the metadata of a file with this content."""
    stated = {key: value for key, value in metadata.items() if key != CHECKSUM_KEY}
    return checksum(json.dumps(stated, sort_keys=True), arrays)


def _content(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    import torch

    return array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
