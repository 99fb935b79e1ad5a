"""Checksums of tensors and text, which safetensors lacks: it detects only a wrong length."""

import json
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

# In the metadata of a safetensors file. Other programs must not use the same name.
CHECKSUM_KEY = "compressive_crc32"


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of a text and of the names, types, shapes and values of tensors."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return str(crc)


def file_checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum that the metadata of a file with this content must state."""
    stated = {key: value for key, value in metadata.items() if key != CHECKSUM_KEY}
    return checksum(json.dumps(stated, sort_keys=True), tensors)
