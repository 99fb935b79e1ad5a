"""Read tensors from a TensorFlow checkpoint: one .index file and .data shards."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compressive.tensorflow_checkpoint.crc32c import crc32c, masked
from compressive.tensorflow_checkpoint.protobuf import as_bytes, as_int, fields, varint
from compressive.tensorflow_checkpoint.table import read_table

_DTYPES = {  # TensorFlow's DataType -> torch's
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    9: torch.int64,
    14: torch.bfloat16,
    19: torch.float16,
}
_STRING = 7
_MAX_DIMENSIONS = 8  # kernels have 4
_COPY_AGAIN = "download or copy it again"


class Entry(NamedTuple):
    """Where a tensor is, and what it is."""

    dtype: int  # TensorFlow's number
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int  # bytes
    checksum: int
    is_sliced: bool


class TensorBundle:
    """The tensors of a checkpoint by their names; reads each on demand.

    Sizes are compared with the files before memory is allocated. Checksums are verified.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(f"{prefix.name}.index")
        table = read_table(self.index)
        if b"" not in table:
            raise ValueError(f"{self.index} is a table without the header of a checkpoint")
        try:
            self.shards = _read_header(table.pop(b""))
            self.entries = {key.decode(): _read_entry(value) for key, value in table.items()}
        except ValueError as error:
            raise ValueError(f"{self.index} is damaged: {error}; {_COPY_AGAIN}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of numbers."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None or entry.is_sliced:
            why = "is split into slices" if dtype else f"has TensorFlow's data type {entry.dtype}"
            raise ValueError(f"{self.prefix}: {name} {why}, which is not supported")
        expected = math.prod(entry.shape) * dtype.itemsize
        if entry.size != expected:
            raise ValueError(
                f"{self.index} is damaged: {name} of shape {list(entry.shape)} must have "
                f"{expected:,} bytes, got {entry.size:,}; {_COPY_AGAIN}"
            )
        content = self._content(name, entry)
        self._check(name, entry, content)
        if not content:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)

    def text(self, name: str) -> bytes:
        """Read a tensor that is one string."""
        entry = self.entries[name]
        if entry.dtype != _STRING or entry.shape:
            raise ValueError(f"{self.prefix}: {name} must be one string")
        content = bytes(self._content(name, entry))
        # The length, a checksum of it, and the string. The checksum of all covers the length as
        # four bytes.
        try:
            size, at = varint(content, 0)
        except ValueError as error:
            raise ValueError(f"{self._shard(entry)} is damaged: {error}; {_COPY_AGAIN}") from None
        string = content[at + 4 :]
        length = size.to_bytes(8, "little")[: 4 if size < 2**32 else 8]
        self._check(name, entry, length + content[at:])
        if size != len(string):
            raise ValueError(f"{self.index} is damaged: {name} has a wrong length; {_COPY_AGAIN}")
        return string

    def _shard(self, entry: Entry) -> Path:
        name = f"{self.prefix.name}.data-{entry.shard:05d}-of-{self.shards:05d}"
        return self.prefix.with_name(name)

    def _content(self, name: str, entry: Entry) -> bytearray:
        path = self._shard(entry)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: it holds {name}; keep all files of a checkpoint in one folder"
            )
        available, end = path.stat().st_size, entry.offset + entry.size
        if min(entry.offset, entry.size) < 0 or end > available:
            raise ValueError(
                f"{path} is truncated, or its index is damaged: {name} ends at byte {end:,} of "
                f"{available:,}; {_COPY_AGAIN}"
            )
        content = bytearray(entry.size)
        with path.open("rb") as file:
            file.seek(entry.offset)
            if file.readinto(content) != entry.size:
                raise ValueError(f"{path} is truncated; {_COPY_AGAIN}")
        return content

    def _check(self, name: str, entry: Entry, content: bytes | bytearray) -> None:
        if masked(crc32c(memoryview(content))) != entry.checksum:
            hint = f"does not fit its checksum; {_COPY_AGAIN}"
            raise ValueError(f"{self._shard(entry)} is damaged: {name} {hint}")


def _read_header(message: bytes) -> int:
    """Return the number of shards."""
    found = dict(fields(message))
    if as_int(found.get(2, 0)):
        raise ValueError("it has big-endian numbers")
    shards = as_int(found.get(1, 0))
    if not 1 <= shards <= 99_999:
        raise ValueError(f"it claims {shards:,} shards")
    return shards


def _read_entry(message: bytes) -> Entry:
    found = dict(fields(message))
    numbers = {i: as_int(found.get(i, 0)) for i in (1, 3, 4, 5, 6)}
    shape = _read_shape(as_bytes(found.get(2, b"")))
    # numbers: data type, shard, offset, size, checksum
    return Entry(numbers[1], shape, numbers[3], numbers[4], numbers[5], numbers[6], 7 in found)


def _read_shape(message: bytes) -> tuple[int, ...]:
    sides = [dict(fields(as_bytes(v))).get(1, 0) for number, v in fields(message) if number == 2]
    shape = tuple(map(as_int, sides))
    if len(shape) > _MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise ValueError(f"a tensor has the shape {list(shape[:8])}")
    return shape
