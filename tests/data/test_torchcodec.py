"""torchcodec returns the pixels of torchvision and PIL, and clean errors for damaged files."""

import io
import random
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from image_kinds import kinds
from PIL import Image

from compressive.data import decode as decode_module
from compressive.data.decode import Unreadable, decode, torchcodec_decoder

pytestmark = [
    pytest.mark.skipif(torchcodec_decoder() is None, reason="torchcodec does not load"),
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
SMOOTH = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
PICTURE = Image.fromarray(SMOOTH).resize((97, 75), Image.Resampling.BICUBIC)


def encoded(kind: str, image: Image.Image = PICTURE, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def cases() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = PICTURE.convert("RGBA")
    clear.putalpha(PICTURE.convert("L"))
    deep = np.random.default_rng(1).integers(0, 65536, (30, 40, 3)).astype(np.uint16)
    return {
        "jpeg baseline": encoded("JPEG"),
        "jpeg progressive": encoded("JPEG", progressive=True),
        "jpeg 4:4:4": encoded("JPEG", subsampling=0),
        "jpeg gray": encoded("JPEG", PICTURE.convert("L")),
        "jpeg cmyk": encoded("JPEG", PICTURE.convert("CMYK")),
        **{f"jpeg exif {i}": encoded("JPEG", exif=_oriented(i)) for i in range(1, 9)},
        "png": encoded("PNG"),
        "png gray": encoded("PNG", PICTURE.convert("L")),
        "png 1 bit": encoded("PNG", PICTURE.convert("1")),
        "png gray 16 bit": encoded("PNG", Image.fromarray(deep[..., 0])),
        "png color 16 bit": cv2.imencode(".png", deep)[1].tobytes(),
        "png palette": encoded("PNG", PICTURE.quantize(64)),
        "png palette 4 bit": encoded("PNG", PICTURE.quantize(9)),
        "png palette alpha": encoded("PNG", PICTURE.quantize(64), transparency=3),
        "png alpha": encoded("PNG", clear),
        "png gray alpha": encoded("PNG", clear.convert("LA")),
        "png exif": encoded("PNG", exif=exif),
        "webp": encoded("WEBP"),
        "webp lossless": encoded("WEBP", lossless=True),
        "webp alpha": encoded("WEBP", clear),
        "webp exif": encoded("WEBP", exif=exif),
    }


def _oriented(i: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = i
    return exif


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the images that torchcodec decodes."""
    found, codec = [], torchcodec_decoder()
    assert codec is not None

    def counted(data: torch.Tensor) -> torch.Tensor:
        found.append(len(data))
        return codec(data)

    monkeypatch.setattr(decode_module, "torchcodec_decoder", lambda: counted)
    return found


def outcome(data: bytes) -> torch.Tensor | type:
    try:
        return decode(data)
    except Unreadable:
        return Unreadable


def fallback(monkeypatch: pytest.MonkeyPatch, data: bytes) -> torch.Tensor | type:
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "torchcodec_decoder", lambda: None)
        return outcome(data)


CASES, KINDS = cases(), kinds()


@pytest.mark.parametrize("name", CASES)
def test_pixels_equal_those_of_the_fallback(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = CASES[name]
    found, expected = outcome(data), fallback(monkeypatch, data)
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected)
    is_left_to_pil = "16 bit" in name or name in ("png exif", "webp exif", "webp alpha")
    assert len(calls) == (0 if is_left_to_pil else 1)


@pytest.mark.parametrize("name", KINDS)
def test_unusual_and_damaged_files_give_the_same_result(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = KINDS[name].data
    found, expected = outcome(data), fallback(monkeypatch, data)
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found is expected


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_random_damage_is_an_error_or_an_image(kind: str, calls: list[int]) -> None:
    generator = random.Random(0)
    whole = encoded(kind)
    for k in range(300):
        data = bytearray(whole)
        cut = generator.randrange(2, len(data))
        if k % 3 == 0:
            for _ in range(generator.randint(1, 8)):
                data[generator.randrange(len(data))] = generator.randrange(256)
        elif k % 3 == 1:
            data = data[:cut]
        else:
            data[cut:] = bytes(len(data) - cut)
        found = outcome(bytes(data))
        assert found is Unreadable or isinstance(found, torch.Tensor)
        if kind != "WEBP" and k % 3 == 1 and cut < len(whole) * 0.9:
            assert found is Unreadable
