"""Read a sorted table of keys and values, LevelDB's format of TensorFlow's .index files."""

from collections.abc import Iterator
from pathlib import Path

from compressive.tensorflow_checkpoint.crc32c import crc32c, masked
from compressive.tensorflow_checkpoint.protobuf import varint

_FOOTER, _TRAILER = 48, 5  # bytes
_MAGIC = bytes.fromhex("57fb808b247547db")
_MAX_BYTES = 2**28  # the index of an official checkpoint has less than 1 MB
_MAX_KEY_SHARE = 64  # bytes of keys per byte of the file; TensorFlow's have less than 2


class NotATable(ValueError):
    """Raised for a file without the magic number of a table."""


def read_table(path: Path) -> dict[bytes, bytes]:
    """Return all keys and values; raise ValueError if a checksum or the structure is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - _FOOTER, 0))
        footer = file.read(_FOOTER)
        if len(footer) < _FOOTER or not footer.endswith(_MAGIC):
            raise NotATable(f"{path} is not the index of a TensorFlow checkpoint, or is truncated")
        if size > _MAX_BYTES:
            raise ValueError(f"{path} has {size:,} bytes; an index has at most {_MAX_BYTES:,}")
        file.seek(0)
        content = file.read(size)
    try:
        _, at = _handle(footer, 0)  # of the meta index, which TensorFlow leaves empty
        index, _ = _handle(footer, at)
        found: dict[bytes, bytes] = {}
        total = 0  # bytes of all keys: shared prefixes could make them as long as the square
        for _, value in entries(_block(content, index)):
            place, _ = _handle(value, 0)
            for key, entry in entries(_block(content, place)):
                total += len(key)
                if key in found or total > _MAX_KEY_SHARE * size:
                    raise ValueError(f"the key {key[:99]!r} occurs twice or is too long")
                found[key] = entry
        return found
    except ValueError as error:
        hint = "download or copy it again"
        raise ValueError(f"{path} is damaged: {error}; {hint}") from None


def entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block; a key may share a prefix with the key before."""
    count = int.from_bytes(block[-4:], "little")  # of restarts, which are for searching
    end = len(block) - 4 * (count + 1)
    if end < 0:
        raise ValueError(f"a block of {len(block):,} bytes claims {count:,} restarts")
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at)
        own, at = varint(block, at)
        size, at = varint(block, at)
        if shared > len(key) or own + size > end - at:
            raise ValueError("an entry reaches beyond its block")
        key = key[:shared] + block[at : at + own]
        at += own + size
        yield key, block[at - size : at]


def _handle(content: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Return position and size of a block, and the position after the two numbers."""
    start, at = varint(content, at)
    size, at = varint(content, at)
    return (start, size), at


def _block(content: bytes, place: tuple[int, int]) -> bytes:
    start, size = place
    if start + size + _TRAILER > len(content) or size < 4:
        raise ValueError(f"a block of {size:,} bytes at {start:,} is outside the file")
    end = start + size
    if content[end]:
        raise ValueError("it is compressed, which TensorFlow's own checkpoints are not")
    expected = int.from_bytes(content[end + 1 : end + _TRAILER], "little")
    if masked(crc32c(content[start : end + 1])) != expected:
        raise ValueError("a block does not fit its checksum")
    return content[start:end]
