"""Pixel descriptors: equal to a cosine transform of scipy, and similar for changed copies only."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.fft import dctn

from compressive.data.synthetic import pictures
from compressive.inspection.descriptor import (
    THUMB,
    crop_similarity,
    descriptors,
    gray_thumb,
    mirrored,
)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.from_numpy(pictures(40)[0])


def thumbs(images: torch.Tensor) -> torch.Tensor:
    return torch.stack([gray_thumb(image) for image in images])


def as_image(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def test_descriptors_are_weighted_cosine_transforms(images: torch.Tensor) -> None:
    small = thumbs(images)
    spectrum = np.asarray(dctn(small.double().numpy(), axes=(1, 2), norm="ortho"))[:, :8, :8]
    axis = np.arange(8)
    weighted = (spectrum * np.hypot(axis[:, None], axis)).reshape(len(small), -1)
    weighted /= np.linalg.norm(weighted, axis=1, keepdims=True)
    assert np.allclose(descriptors(small).numpy(), weighted, atol=1e-5)


def test_mirrored_descriptors_are_those_of_mirrored_images(images: torch.Tensor) -> None:
    expected = descriptors(thumbs(images.flip(3)))
    assert torch.allclose(mirrored(descriptors(thumbs(images))), expected, atol=1e-5)


def jpeg(picture: Image.Image) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=75)
    return Image.open(file)


CHANGES = {
    "jpeg": jpeg,
    "larger": lambda p: p.resize((77, 77), Image.Resampling.BICUBIC),
    "brighter": lambda p: ImageEnhance.Brightness(p).enhance(1.2),
    "mirrored": lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda p: p.crop((1, 3, 29, 31)),
    "cropped and mirrored": lambda p: p.crop((4, 0, 30, 26)).transpose(
        Image.Transpose.FLIP_LEFT_RIGHT
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_more_similar_than_other_images(
    images: torch.Tensor, change: str
) -> None:
    changed = [
        as_image(CHANGES[change](Image.fromarray(i.permute(1, 2, 0).numpy()))) for i in images
    ]
    both = torch.cat([thumbs(images), torch.stack([gray_thumb(i) for i in changed])])
    own = torch.arange(len(images))
    copies = crop_similarity(both, torch.stack([own, own + len(images)], 1))
    assert (copies > 0.94).float().mean() > 0.9
    back = crop_similarity(both, torch.stack([own + len(images), own], 1))
    assert torch.allclose(copies, back, atol=1e-5)  # either one may be the crop
    others = crop_similarity(both, torch.stack([own, own.roll(1) + len(images)], 1))
    assert (others > 0.94).float().mean() < 0.1


def test_crops_of_pairs_equal_a_loop_over_all_crops(images: torch.Tensor) -> None:
    small = thumbs(images[:12])
    pairs = torch.tensor([(0, i) for i in range(1, 12)] + [(5, 0), (3, 4), (4, 3)])
    found = crop_similarity(small, pairs).tolist()
    for (a, b), cosine in zip(pairs.tolist(), found, strict=True):
        best = [loop_over_crops(small[i].numpy(), small[j]) for i, j in ((a, b), (b, a))]
        assert cosine == pytest.approx(max(best), abs=1e-5)
    assert crop_similarity(small, torch.zeros(0, 2, dtype=torch.long)).tolist() == []


def loop_over_crops(whole: np.ndarray, part: torch.Tensor) -> float:
    """Return the largest cosine of `part`, also mirrored, and the spectra of crops by scipy."""
    targets = torch.cat([descriptors(each[None]) for each in (part, part.flip(1))]).numpy()
    axis, best = np.arange(8), -1.0
    for side in (32, 30, 28, 26, 24):
        for top in range(33 - side):
            for left in range(33 - side):
                crop = whole[top : top + side, left : left + side].astype(float)
                spectrum = np.asarray(dctn(crop, norm="ortho"))[:8, :8]
                vector = (spectrum * np.hypot(axis[:, None], axis)).ravel()
                best = max(best, *(targets @ (vector / np.linalg.norm(vector))))
    return best


def test_an_even_image_is_similar_to_none() -> None:
    even = torch.full((2, THUMB, THUMB), 7, dtype=torch.uint8)
    assert (descriptors(even).norm(dim=1) < 1e-3).all()
