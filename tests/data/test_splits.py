"""Held-out images and label subsets have exact sizes, balanced classes and fixed seeds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressive.data.source import ImageSource
from compressive.data.splits import few_labels, imagenet_list, per_class, stratified
from compressive.rng import image_keys, uniforms, uniforms_of_all


def labels_of(counts: list[int], seed: int = 0) -> Tensor:
    every = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(np.random.default_rng(seed).permutation(every))


def by_class(labels: Tensor, index: Tensor, classes: int) -> list[int]:
    return np.bincount(labels[index].numpy(), minlength=classes).tolist()


COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda c: max(c) > 1)


@pytest.mark.slow
@given(COUNTS, st.floats(0.01, 0.99), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_every_class_of_two_or_more_is_in_both_parts(
    counts: list[int], share: float, seed: int, data: st.DataObject
) -> None:
    labels = labels_of(counts, seed)
    least = sum(n > 1 for n in counts)
    most = sum(n - 1 for n in counts if n)
    exact = data.draw(st.integers(least, most))
    for size in (share, exact):
        kept, held = stratified(labels, size, seed=seed)
        assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(labels)))
        assert torch.equal(held, held.sort().values)
        assert torch.equal(kept, kept.sort().values)
        left, out = by_class(labels, kept, len(counts)), by_class(labels, held, len(counts))
        assert all(left[c] and out[c] for c, n in enumerate(counts) if n > 1)
        assert all(left[c] == n for c, n in enumerate(counts) if n < 2)
        wanted = size if isinstance(size, int) else min(max(round(size * len(labels)), least), most)
        assert len(held) == wanted


def test_held_out_images_are_proportional_to_class_sizes() -> None:
    """Counts are within one image per class, if no class is so small that it is rounded up."""
    counts = [1000, 500, 250, 33, 70]
    labels = labels_of(counts)
    out = by_class(labels, stratified(labels, 400, seed=0).held, 5)
    for held, count in zip(out, counts, strict=True):
        assert abs(held - 400 * count / sum(counts)) < 1


@pytest.mark.slow
def test_held_out_images_are_drawn_by_the_seed() -> None:
    labels = labels_of([100, 50])
    first, again, other = (stratified(labels, 30, seed=seed).held for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Over many seeds, every image of a class is held out equally often: 20 of 100. Of 300 draws
    # that is 60 with a standard deviation of 7; five deviations are allowed.
    times = torch.zeros(150)
    for seed in range(300):
        times[stratified(labels, 30, seed=seed).held] += 1
    assert (times - 60).abs().max() < 35


@pytest.mark.parametrize("size", [0, 1, 9, 10, 0.0, 1.0, -0.5])
def test_invalid_size_is_rejected(size: float) -> None:
    with pytest.raises(ValueError, match=r"0 and 1 .*2 to 8"):
        stratified(labels_of([5, 5]), size, seed=0)


def test_unlabeled_images_cannot_be_stratified() -> None:
    with pytest.raises(ValueError, match="1 of 3"):
        stratified(torch.tensor([0, -1, 0]), 1, seed=0)


def test_per_class_keeps_n_images_of_each_class() -> None:
    labels = labels_of([31, 90, 12])
    kept, held = per_class(labels, 30, seed=3)
    assert by_class(labels, kept, 3) == [30, 30, 12]
    assert by_class(labels, held, 3) == [1, 60, 0]
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(133))


@pytest.mark.slow
def test_few_labels_of_imagenet_match_the_size_of_simclrs_lists() -> None:
    """The lists have 12,811 = 811 x 13 + 189 x 12 and 128,116 = 116 x 129 + 884 x 128 images."""
    sizes = np.full(1000, 1300)  # in ImageNet, 895 classes have 1,300 images and the rest fewer
    sizes[895:] = 1119
    sizes[-1] += 1_281_167 - sizes.sum()
    labels = labels_of(sizes.tolist())
    one, ten = few_labels(labels, 0.01), few_labels(labels, 0.1)
    assert (len(one), len(ten)) == (12_811, 128_116)
    assert np.unique(by_class(labels, one, 1000), return_counts=True)[1].tolist() == [189, 811]
    found = np.unique(by_class(labels, ten, 1000), return_counts=True)
    assert [part.tolist() for part in found] == [[128, 129], [884, 116]]


@given(COUNTS, st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_few_labels_are_nested_and_balanced_over_all_classes(
    counts: list[int], a: float, b: float, draw: int
) -> None:
    labels = labels_of(counts)
    few, more = (few_labels(labels, share, draw=draw, seed=5) for share in sorted((a, b)))
    assert set(few.tolist()) <= set(more.tolist())
    assert torch.equal(few, few.unique())
    found = by_class(labels, few, len(counts))
    assert all(found[c] > 0 for c, n in enumerate(counts) if n)
    # A class has fewer than another only if it has no more images, or by one.
    assert all(found[c] == n or found[c] >= max(found) - 1 for c, n in enumerate(counts))


def test_few_labels_depend_on_draw_and_seed() -> None:
    labels = labels_of([50] * 10)
    first = few_labels(labels, 0.1)
    assert len(first) == 50
    assert torch.equal(first, few_labels(labels, 0.1, draw=0, seed=0))
    for other in (few_labels(labels, 0.1, draw=1), few_labels(labels, 0.1, seed=1)):
        assert by_class(labels, other, 10) == [5] * 10
        assert not torch.equal(first, other)
    assert torch.equal(few_labels(labels, 1.0), torch.arange(500))
    # 0.29 x 100 is 28.999... in floating point.
    assert len(few_labels(torch.zeros(100, dtype=torch.int64), 0.29)) == 29
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=r"above 0 .* 1"):
            few_labels(labels, share)


def test_few_labels_are_independent_of_held_out_images() -> None:
    """50 and 50 of 500 images have 5 in common on average, or 50 if the draws were equal."""
    labels = labels_of([50] * 10)
    held = set(stratified(labels, 50, seed=0).held.tolist())
    assert len(held & set(few_labels(labels, 0.1).tolist())) < 20
    assert len(held & set(per_class(labels, 5, seed=0).kept.tolist())) < 20


def imagenet(
    places: list[str], classes: tuple[str, ...] = ("n01440764", "n01443537")
) -> ImageSource:
    labels = torch.tensor([int(classes[1] in place) for place in places])
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    return ImageSource(
        name="imagenet",
        count=len(places),
        read=lambda i: image,
        place=lambda i: places[i],
        labels=labels,
        classes=classes,
    )


@pytest.mark.parametrize("folder", ["/data/train/n01440764/", "/data/train-000.tar:"])
def test_simclr_list_keeps_its_order(tmp_path: Path, folder: str) -> None:
    names = ["n01440764_10.JPEG", "n01440764_9.JPEG", "n01443537_7.JPEG"]
    places = [folder.replace("n01440764", name[:9]) + name for name in names]
    file = tmp_path / "1percent.txt"
    file.write_text("n01443537_7.JPEG\nn01440764_10.JPEG\n")
    assert imagenet_list(file, imagenet(places)).tolist() == [2, 0]


def test_mismatched_list_is_rejected(tmp_path: Path) -> None:
    source = imagenet(["/train/n01443537/n01440764_10.JPEG", "/train/n01440764/n01440764_9.JPEG"])
    file = tmp_path / "10percent.txt"
    with pytest.raises(FileNotFoundError, match="imagenet_subsets"):
        imagenet_list(file, source)
    file.write_text("n01440764_9.JPEG\nn01440764_8.JPEG\n")
    with pytest.raises(ValueError, match=r"1 of the 2 .* n01440764_8\.JPEG"):
        imagenet_list(file, source)
    file.write_text("n01440764_10.JPEG\n")
    with pytest.raises(ValueError, match=r"n01440764_10\.JPEG .* n01443537"):
        imagenet_list(file, source)
    file.write_text("")
    with pytest.raises(ValueError, match="empty"):
        imagenet_list(file, source)


def test_held_out_images_are_apportioned_by_websters_method() -> None:
    """Draw 7 of 53, 24 and 23: divisors 1, 3, 5, ... give 53/3, 53/5, 24/3 and 23/3, so 3, 2 and 2.

    Divisors 1, 2, 3, ... (Jefferson, D'Hondt) would give 4, 2 and 1 and favor large classes.
    """
    labels = torch.arange(3).repeat_interleave(torch.tensor([53, 24, 23]))
    for seed in range(3):
        assert labels[stratified(labels, 7, seed=seed).held].bincount().tolist() == [3, 2, 2]


@pytest.mark.parametrize("classes", [1, 3, 70_000])
@pytest.mark.parametrize("size", [0.01, 0.5, 0.9])
def test_splits_match_a_complete_sort(classes: int, size: float) -> None:
    """Rank images within each class and select by comparing tuples, without radix or partition."""
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (300,), generator=generator).repeat_interleave(2)
    lots: dict[int, list[tuple[float, float]]] = {}
    for stream in (2**31, 2**31 + 2):
        found = uniforms(image_keys(torch.arange(600), seed=4, view=stream), 2)
        lots[stream] = [(float(a), float(b)) for a, b in found]
    due, few = [], []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0].tolist()
        for k, i in enumerate(sorted(members, key=lambda i: lots[2**31][i][0])):
            at = 0 if k == 0 else np.inf if k == len(members) - 1 else (k + 0.5) / len(members)
            due.append((at, lots[2**31][i][1], i))
        for k, i in enumerate(sorted(members, key=lambda i: lots[2**31 + 2][i][0])):
            few.append((k, lots[2**31 + 2][i][1], i))
    own = len(labels.unique())
    wanted = min(max(round(size * 600), own), 600 - own)
    kept, held = stratified(labels, size, seed=4)
    assert held.tolist() == sorted(i for *_, i in sorted(due)[:wanted])
    assert kept.tolist() == sorted(i for *_, i in sorted(due)[wanted:])
    wanted = max(int(600 * size), own)
    assert few_labels(labels, size, seed=4).tolist() == sorted(i for *_, i in sorted(few)[:wanted])


@pytest.mark.parametrize(("images", "count"), [(0, 1), (3, 2), (2**15, 3), (2**16 + 5, 1)])
def test_numbers_of_all_images_are_computed_in_parts(images: int, count: int) -> None:
    at = {"seed": 7, "epoch": 2**32 - 1, "view": 5}
    whole = uniforms(image_keys(torch.arange(images), **at), count)
    assert torch.equal(uniforms_of_all(images, count, **at), whole)
