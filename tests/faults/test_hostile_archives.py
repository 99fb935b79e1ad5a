"""Random damage to archives, Arrow files and lists never causes other errors or a crash."""

import random
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
from input_formats import FORMATS
from processes import together

from compressive.data.source import Source
from compressive.data.sources import open_source

KINDS = ("zip archive", "tar.gz archive", "tar archive", "tar.xz archive", "save_to_disk")
KINDS += ("csv list", "parquet list")
ROUNDS = 150


def damaged(data: bytes, seed: int) -> bytes:
    """Return data with a few changed bytes, a lost part, or a lost end."""
    draw, found = random.Random(seed), bytearray(data)
    if seed % 3 == 0:
        return bytes(found[: draw.randrange(len(found))])
    if seed % 3 == 1:
        at = draw.randrange(len(found))
        del found[at : at + draw.randrange(1, 200)]
        return bytes(found)
    for _ in range(draw.randrange(1, 8)):
        # Most damage is near the ends, where archives have their indices.
        end = draw.choice([len(found), min(2000, len(found))])
        found[draw.choice([-1, 1]) * draw.randrange(1, end)] = draw.randrange(256)
    return bytes(found)


def opened(place: Path) -> tuple[Source | None, str]:
    try:
        return open_source(place), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def read_damaged(_: int, root: Path, name: str, rounds: int) -> None:
    place: Path = FORMATS[name].make(root)
    file = next(place.glob("*.arrow")) if place.is_dir() else place
    whole = file.read_bytes()
    for seed in range(rounds):
        file.unlink()  # Arrow files are mapped into memory, which must not change
        file.write_bytes(damaged(whole, seed))
        source, message = opened(place)
        assert "\n" not in message, seed
        for i in range(0 if source is None else len(source)):
            with suppress(ValueError, OSError):
                cast(Source, source).image(i)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_damage_gives_one_line_or_unreadable_images(name: str, tmp_path: Path) -> None:
    """In another process, because a crash would end this one."""
    together(read_damaged, (tmp_path, name, ROUNDS), 1)
