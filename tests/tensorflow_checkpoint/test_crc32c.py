"""CRC-32C equals published values and a loop over bytes."""

import numpy as np
import pytest

from compressive.tensorflow_checkpoint.crc32c import crc32c, masked


@pytest.mark.parametrize(
    ("content", "expected"),  # RFC 3720, section B.4, and the usual check value
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_published_values(content: bytes, expected: int) -> None:
    assert crc32c(content) == expected


def by_bytes(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 1023, 1024, 1025, 3000])
def test_all_sizes_equal_a_loop_over_bytes(size: int) -> None:
    """Blocks of 1 KB: the loop is too slow for those of 1 MB."""
    content = np.random.RandomState(size).bytes(size)
    assert crc32c(content, lanes=32, block=1024) == by_bytes(content)


def test_large_content_depends_on_every_byte() -> None:
    content = bytearray(np.random.RandomState(0).bytes(3 * 2**20 + 12345))
    before = crc32c(bytes(content))
    for place in (0, 2**20 - 1, 2**20, 2 * 2**20 + 4097, len(content) - 1):
        content[place] ^= 1
        assert crc32c(bytes(content)) != before
        content[place] ^= 1
    assert crc32c(bytes(content)) == before


def test_mask_is_that_of_leveldb() -> None:
    crc = crc32c(b"foo")
    rotated = (masked(crc) - 0xA282EAD8) % 2**32
    assert (rotated << 15 | rotated >> 17) % 2**32 == crc
