"""Read the wire format of protocol buffers, without generated code."""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}

Value = int | bytes


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: an integer, or bytes of a text or inner message."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = varint(message, at)
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
        else:
            raise ValueError(f"wire type {kind} is unknown")
        if size > len(message) - at:
            raise ValueError(f"a field has {size:,} bytes, but {len(message) - at:,} are left")
        content = message[at : at + size]
        at += size
        yield number, content if kind == _BYTES else int.from_bytes(content, "little")


def varint(content: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned number of up to 64 bits, and the position after it."""
    value = 0
    for i, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value & (2**64 - 1), at + i + 1
    raise ValueError("a number is truncated or has more than 64 bits")


def as_bytes(value: Value) -> bytes:
    """Return the value of a text or message field; raise ValueError for a number."""
    if isinstance(value, bytes):
        return value
    raise ValueError("a field is a number instead of bytes")


def as_int(value: Value) -> int:
    """Return the value of a signed number field; raise ValueError for bytes."""
    if isinstance(value, int):
        return value - 2**64 if value >= 2**63 else value
    raise ValueError("a field has bytes instead of a number")


def as_string(value: Value) -> str:
    """Return the value of a text field."""
    return as_bytes(value).decode()
