"""The built-in images have the same bytes on all machines and no linear shortcut to the class."""

import hashlib
from typing import NamedTuple

import numpy as np
import pytest
from numpy import ndarray
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from compressive.data.synthetic import CLASSES, pictures

SPLITS = ("train", "test")
TRAIN, TEST = 6000, 2400  # sizes of the source "builtin"


class Pixels(NamedTuple):
    train: ndarray
    train_labels: ndarray
    test: ndarray
    test_labels: ndarray


@pytest.fixture(scope="module")
def pixels() -> Pixels:
    """Return centered raw pixels, scaled by their overall standard deviation."""
    (train, train_labels), (test, test_labels) = pictures(TRAIN), pictures(TEST, split="test")
    flat = train.reshape(TRAIN, -1).astype(np.float32)
    mean, std = flat.mean(0), flat.std()
    other = (test.reshape(TEST, -1) - mean) / std
    return Pixels((flat - mean) / std, train_labels, other, test_labels)


def digest(split: str, seed: int = 0) -> str:
    images, labels = pictures(240, seed=seed, split=split)
    return hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()[:16]


def test_image_bytes_are_the_same_on_all_machines() -> None:
    """numpy 1.26 and 2.4 give these hashes on x86-64, with AVX-512 and without vectors beyond SSE.

    An intended change of the images must change these hashes.
    """
    assert digest("train") == "1ed8f90e27b1815f"
    assert digest("test") == "c8352a6c683e0a10"
    assert digest("train", seed=1) == "247d624c9e8c351f"


def test_images_do_not_depend_on_the_count() -> None:
    images, labels = pictures(600)
    for count in (0, 1, 7, 250, 251, 503):  # within, at and beyond blocks of 250 and rounds of 12
        fewer = pictures(count)
        np.testing.assert_array_equal(fewer.images, images[:count])
        np.testing.assert_array_equal(fewer.labels, labels[:count])


def test_shapes_and_dtypes() -> None:
    images, labels = pictures(5)
    assert (images.shape, images.dtype) == ((5, 3, 32, 32), np.uint8)
    assert (labels.shape, labels.dtype) == ((5,), np.int64)
    assert len(CLASSES) == len(set(CLASSES)) == 12


def test_every_twelve_images_have_each_class_once_in_random_order() -> None:
    rounds = pictures(1200).labels.reshape(-1, 12)
    np.testing.assert_array_equal(np.sort(rounds, 1), np.broadcast_to(np.arange(12), (100, 12)))
    assert len(np.unique(rounds, axis=0)) == 100  # a repeated order among 12! has chance 1e-5
    # A class's position in a round has mean 5.5 and deviation 3.45 / sqrt(100); 4.5 deviations for
    # 12.
    np.testing.assert_allclose(np.argsort(rounds, 1).mean(0), 5.5, atol=1.6)


@pytest.mark.slow
def test_splits_and_seeds_share_no_image() -> None:
    sets = [pictures(1200, seed=seed, split=split).images for seed in (0, 1) for split in SPLITS]
    images = np.concatenate(sets).reshape(4800, -1)
    assert len(np.unique(images, axis=0)) == 4800
    # Near duplicates are excluded too: centered unrelated images are nearly uncorrelated.
    flat = images.astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    same_place = [flat[a::1200] for a in range(50)]
    assert max(abs(np.triu(some @ some.T, 1)).max() for some in same_place) < 0.8


@pytest.mark.slow
def test_mean_color_and_brightness_do_not_reveal_the_class(pixels: Pixels) -> None:
    """A class differs from all images only by chance: t values of its means over 500 images.

    Over 12 x 3 channels and 12 x 3 x 16 squares of 8 pixels, |t| above 4.5 has probability 0.004.
    """
    images = pictures(TRAIN).images.astype(np.float64)
    squares = images.reshape(TRAIN, 3, 4, 8, 4, 8).mean((3, 5)).reshape(TRAIN, -1)
    for values in (images.mean((2, 3)), squares):
        for label in range(12):
            own = values[pixels.train_labels == label]
            t = (own.mean(0) - values.mean(0)) / (values.std(0) / np.sqrt(len(own)))
            assert abs(t).max() < 4.5, CLASSES[label]


@pytest.mark.slow
def test_linear_probe_on_pixels_is_near_chance(pixels: Pixels) -> None:
    """The penalty is chosen on a sixth of train. Measured: 9.5 %; chance is 8.3 %."""
    cut, (x, y) = 5000, pixels[:2]

    def probe(strength: float, count: int) -> LogisticRegression:
        return LogisticRegression(C=strength, max_iter=40, tol=1e-3).fit(x[:count], y[:count])

    # Weaker penalties fit train up to 100 %, and test no better: 8 to 10 %.
    best = max((1e-6, 1e-5, 1e-4), key=lambda c: probe(c, cut).score(x[cut:], y[cut:]))
    assert probe(best, TRAIN).score(pixels.test, pixels.test_labels) < 0.2


@pytest.mark.slow
def test_nearest_neighbor_in_pixels_is_mostly_wrong(pixels: Pixels) -> None:
    """One neighbor among 6,000. Measured: 18 % on all test images."""
    nearest = KNeighborsClassifier(1).fit(pixels.train, pixels.train_labels)
    assert nearest.score(pixels.test[:1200], pixels.test_labels[:1200]) < 0.25


@pytest.mark.slow
def test_power_spectrum_reveals_the_class() -> None:
    """A classifier of shift-invariant statistics finds the class despite the nuisances.

    The log power spectrum of the brightness is not a linear function of pixels. Measured: 35 %;
    chance is 8.3 %.
    """
    (train, labels), (test, test_labels) = pictures(3000), pictures(1200, split="test")

    def spectrum(images: ndarray) -> ndarray:
        gray = images.mean(1) / 255
        power = abs(np.fft.rfft2(gray - gray.mean((1, 2), keepdims=True))) ** 2
        return np.log(power + 1e-2).reshape(len(images), -1)

    seen = spectrum(train)
    mean, std = seen.mean(0), seen.std(0) + 1e-6
    probe = LogisticRegression(C=1e-3, max_iter=60, tol=1e-3).fit((seen - mean) / std, labels)
    assert probe.score((spectrum(test) - mean) / std, test_labels) > 0.3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"count": -1}, "count.* -1"),
        ({"count": 1, "seed": -1}, r"seed.* -1$"),
        ({"count": 1, "split": "val"}, "split.*train, test.*'val'"),
    ],
)
def test_invalid_arguments_are_rejected(asked: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pictures(**asked)
