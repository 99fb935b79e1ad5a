"""The gallery shows unchanged images, their true nearest neighbors and a t-SNE map."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from colored_images import paint
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE, trustworthiness
from tiny import noise, photos, silent, tiny
from tiny_context import Mean, context_of

from compressive.augment.ops import augment_pair
from compressive.config import Config
from compressive.data.source import Source
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.evaluation.results import Results
from compressive.evaluation.tasks.gallery import write_gallery
from compressive.evaluation.tasks.tsne import joint_probabilities, kl_gradient, tsne
from compressive.rng import image_keys
from compressive.train.loop import pretrain
from compressive.train.step import view_pair

Arrays = dict[str, NDArray[np.generic]]


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Read the file as the report does, without torch."""
    with safe_open(path, "numpy") as file:
        return load_file(path), file.metadata()


def read_pixels(source: Source, place: int) -> NDArray[np.generic]:
    return np.asarray(Image.open(source.origin(place)))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> EvalContext:
    """Return a run with custom augmentations, on images of the network's input size."""
    folder = tmp_path_factory.mktemp("gallery")
    paint(folder / "data" / "train", seed=0, each=20)
    paint(folder / "data" / "test", seed=1, each=12)
    changes = (
        "views.size=20",
        "views.policy=simclr",
        "views.strength=0.2",
        "views.crop_scale_min=0.5",
    )
    pretrain(tiny(f"data.source={folder / 'data'}", *changes), folder / "run", display=silent())
    model = open_model(str(folder / "run"), torch.device("cpu"))
    splits = open_splits(str(folder / "data"), seed=0)
    return EvalContext(model, splits, Results("run"), device=torch.device("cpu"))


@pytest.fixture(scope="module")
def gallery(
    context: EvalContext, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Arrays, dict[str, str]]:
    folder = tmp_path_factory.mktemp("evaluation")
    path = write_gallery(context, folder, rows=5, pairs=2, neighbors=4)
    assert path == folder / "gallery.safetensors"
    assert [path] == list(folder.iterdir())
    return read(path)


@pytest.mark.slow
def test_file_has_the_arrays_the_report_reads(gallery: tuple[Arrays, dict[str, str]]) -> None:
    arrays, about = gallery
    assert {name: (value.dtype.name, value.shape) for name, value in arrays.items()} == {
        "views": ("uint8", (5, 5, 20, 20, 3)),
        "query": ("uint8", (5, 20, 20, 3)),
        "neighbors": ("uint8", (5, 4, 20, 20, 3)),
        "query_label": ("int64", (5,)),
        "neighbor_label": ("int64", (5, 4)),
        "map": ("float32", (36, 2)),
        "map_label": ("int64", (36,)),
    }
    assert json.loads(about["classes"]) == ["class0", "class1", "class2"]
    assert "36 of 36 test images" in about["map_method"]


def test_queries_are_evenly_spaced_unchanged_images(
    context: EvalContext, gallery: tuple[Arrays, dict[str, str]]
) -> None:
    """For images of the network's input size the central crop is the whole image."""
    arrays, _ = gallery
    for row, place in enumerate((0, 8, 17, 26, 35)):
        expected = read_pixels(context.splits.test, place)
        np.testing.assert_array_equal(arrays["query"][row], expected)
        np.testing.assert_array_equal(arrays["views"][row, 0], expected)
        assert arrays["query_label"][row] == place // 12


def test_view_pairs_use_the_augmentations_of_the_run(
    context: EvalContext, gallery: tuple[Arrays, dict[str, str]]
) -> None:
    """Compare with the network's input after undoing ImageNet normalization."""
    views = gallery[0]["views"].astype(float)
    assert context.model.config is not None
    place = torch.tensor([0, 8, 17, 26, 35])
    (batch,) = context.batches_at("test", place)

    def augmented(config: Config, first: int) -> NDArray[np.floating]:
        number = torch.tensor([first] * 5 + [first + 1] * 5)
        keys = image_keys(place.repeat(2), seed=0, epoch=2**32 - 3, view=number)
        height, width, pair = batch.height, batch.width, view_pair(config.views)
        pair = augment_pair(batch.images, keys, pair, 20, height=height, width=width)
        colors = torch.stack(pair, 1).permute(0, 1, 3, 4, 2).numpy()
        return 255 * (colors * [0.229, 0.224, 0.225] + [0.485, 0.456, 0.406])

    for first in (0, 2):
        found = views[:, 1 + first : 3 + first]
        # Rounding by half a gray level, plus float32 error.
        np.testing.assert_allclose(found, augmented(context.model.config, first), atol=0.51)
        assert np.abs(found - augmented(Config(), first)).mean() > 10
    assert np.abs(views[:, 1:3] - views[:, 3:5]).mean() > 5, "the pairs do not differ"


def test_neighbors_match_a_naive_loop(
    context: EvalContext, gallery: tuple[Arrays, dict[str, str]]
) -> None:
    arrays, _ = gallery
    train, test = (context.features(split).feats.double().numpy() for split in ("train", "test"))
    labels = context.splits.train.labels
    assert labels is not None
    for row, place in enumerate((0, 8, 17, 26, 35)):
        query = test[place]
        cosine = [query @ x / math.sqrt((query @ query) * (x @ x)) for x in train]
        for rank, best in enumerate(np.argsort(cosine)[::-1][:4]):
            expected = read_pixels(context.splits.train, int(best))
            np.testing.assert_array_equal(arrays["neighbors"][row, rank], expected)
            assert arrays["neighbor_label"][row, rank] == labels[best]


@pytest.mark.slow
def test_map_points_keep_their_labels_and_can_be_limited(tmp_path: Path) -> None:
    """Mean colors separate the three classes, so nearest points on the map share a class."""
    paint(tmp_path / "train", seed=0, each=4)
    paint(tmp_path / "test", seed=1, each=20)
    arrays, about = read(write_gallery(context_of(tmp_path), tmp_path / "out", most=40))
    assert "40 of 60" in about["map_method"]
    distances = cdist(arrays["map"], arrays["map"]) + np.diag([np.inf] * 40)
    assert (arrays["map_label"][distances.argmin(1)] == arrays["map_label"]).all()
    assert set(arrays["map_label"].tolist()) == {0, 1, 2}
    few, about = read(write_gallery(context_of(tmp_path), tmp_path / "few", most=3))
    assert "map" not in few
    assert "map_method" not in about


def test_gallery_works_without_labels_or_config(tmp_path: Path) -> None:
    """30 images split into 24 train and 6 test, fewer than the requested rows and neighbors."""
    arrays, about = read(
        write_gallery(context_of(photos(tmp_path / "flat", 30)), tmp_path, neighbors=50)
    )
    assert arrays["views"].shape == (6, 7, 16, 16, 3)
    assert arrays["neighbors"].shape == (6, 24, 16, 16, 3)
    for name in ("query_label", "neighbor_label", "map_label"):
        assert (arrays[name] == -1).all()
    assert json.loads(about["classes"]) == []


def test_unreadable_image_does_not_shift_others(tmp_path: Path) -> None:
    paint(tmp_path / "train", seed=0, each=4)
    paint(tmp_path / "test", seed=1, each=2)
    for split, place in (("train", "class0/0-0-1.png"), ("test", "class1/1-1-0.png")):
        (tmp_path / split / place).write_bytes(b"no image")
    model = FrozenModel(name="mean", network=Mean().eval(), size=20)
    splits = open_splits(str(tmp_path), seed=0)
    context = EvalContext(model, splits, Results("mean"), device=torch.device("cpu"))
    arrays, _ = read(write_gallery(context, tmp_path / "out", neighbors=11))
    for row, place in enumerate((0, 1, 3, 4, 5)):
        np.testing.assert_array_equal(arrays["query"][row], read_pixels(splits.test, place))
    assert arrays["query_label"].tolist() == [0, 0, 1, 2, 2]
    readable = {read_pixels(splits.train, i).tobytes() for i in range(12) if i != 1}
    assert {image.tobytes() for image in arrays["neighbors"][0]} == readable


def test_large_images_are_downscaled_by_averaging(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("test", 1)):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(count):
            noise(192, 192, seed=i).save(tmp_path / split / "a" / f"{i}.png")
    model = FrozenModel(name="mean", network=Mean().eval(), size=192)
    splits = open_splits(str(tmp_path), seed=0)
    context = EvalContext(model, splits, Results("mean"), device=torch.device("cpu"), share=1.0)
    arrays, _ = read(write_gallery(context, tmp_path / "out", pairs=1))
    assert arrays["views"].shape == (1, 3, 96, 96, 3)
    pixels = read_pixels(splits.test, 0).reshape(96, 2, 96, 2, 3).mean((1, 3))
    np.testing.assert_allclose(arrays["query"][0], pixels, atol=0.51)  # rounding


def test_zero_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got 8, 0, 8"):
        write_gallery(context_of(photos(tmp_path / "flat", 10)), tmp_path, pairs=0)


def digits(begin: int, end: int) -> NDArray[np.floating]:
    x = load_digits(return_X_y=True)[0][begin:end]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def naive_probabilities(x: NDArray[np.floating], perplexity: float) -> NDArray[np.floating]:
    """Compute the definition row by row with scipy's root finder."""
    squared, p = cdist(x, x, "sqeuclidean"), np.zeros((len(x), len(x)))
    for i in range(len(x)):
        others = np.delete(squared[i], i)

        def given(sharpness: float, others: NDArray[np.floating] = others) -> NDArray[np.floating]:
            weight = np.exp(-sharpness * (others - others.min()))
            return weight / weight.sum()

        def excess(sharpness: float) -> float:
            row = given(sharpness)
            return -float(row @ np.log(np.maximum(row, 1e-300))) - math.log(perplexity)

        row = given(brentq(excess, 1e-3, 1e5, xtol=1e-12, rtol=1e-14))  # pyright: ignore
        p[i] = np.insert(row, i, 0)
    return (p + p.T) / (2 * len(x))


def test_tsne_probabilities_have_the_requested_perplexity() -> None:
    x = digits(0, 150)
    p = joint_probabilities(torch.tensor(x), 20.0).numpy()
    np.testing.assert_allclose(p, naive_probabilities(x, 20.0), rtol=1e-8, atol=1e-15)
    assert p.sum() == pytest.approx(1, abs=1e-12)


def test_tsne_gradient_matches_autograd() -> None:
    """Differentiate the definition with autograd."""
    p = torch.tensor(naive_probabilities(digits(0, 60), 10.0))
    y = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    near = 1 / (1 + torch.cdist(y, y, compute_mode="donot_use_mm_for_euclid_dist").square())
    near = near * (1 - torch.eye(60))
    off = ~torch.eye(60, dtype=torch.bool)
    divergence = (p[off] * (p[off] / (near / near.sum())[off]).log()).sum()
    (expected,) = torch.autograd.grad(divergence, y)
    torch.testing.assert_close(kl_gradient(p, y.detach(), 1.0), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.stress
def test_tsne_is_as_good_as_sklearn() -> None:
    """Sum over two maps: one may reach a worse minimum, and scikit-learn varies by 8 % by start."""
    ours, theirs = [], []
    for begin in (0, 500):
        x = digits(begin, begin + 250)
        p = naive_probabilities(x, 30.0)
        model = TSNE(method="exact", random_state=0)
        best = model.fit_transform(x)
        # The same measure, except for the tolerance of their perplexity search.
        assert divergence(p, best) == pytest.approx(model.kl_divergence_, rel=1e-3)
        found = tsne(torch.tensor(x).float()).numpy()
        ours.append(divergence(p, found))
        theirs.append(divergence(p, best))
        good, reached = (trustworthiness(x, y, n_neighbors=10) for y in (found, best))
        assert good > reached - 0.005
        flat = np.linalg.svd(x - x.mean(0))[0][:, :2]
        assert good > trustworthiness(x, flat, n_neighbors=10) + 0.05, "PCA is not clearly worse"
    assert sum(ours) < 1.08 * sum(theirs)


def divergence(p: NDArray[np.floating], y: NDArray[np.floating]) -> float:
    q = 1 / (1 + cdist(y, y, "sqeuclidean"))
    np.fill_diagonal(q, 0)
    positive = p > 1e-200
    return float((p[positive] * np.log(p[positive] / (q / q.sum())[positive])).sum())


def test_tsne_is_deterministic() -> None:
    x = torch.tensor(digits(0, 80)).float()
    assert torch.equal(tsne(x), tsne(x))


def test_tsne_of_identical_features_is_one_point() -> None:
    assert (tsne(torch.ones(20, 4)).abs() < 1e-3).all()


@pytest.mark.parametrize("bad", [torch.ones(3, 5), torch.ones(9, 1), torch.full((9, 4), math.nan)])
def test_invalid_tsne_input_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="map needs"):
        tsne(bad)
