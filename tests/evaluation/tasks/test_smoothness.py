"""Local Lipschitz estimates match scipy and colorsys, image by image."""

import colorsys
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import CosineLaw, ratio
from scipy import integrate
from scipy import stats as scipy_stats
from tiny import noise, tiny
from tiny_context import Mean, context_of, place
from torch import Tensor
from torch.nn.functional import normalize as unit

from compressive.augment.ops import MEAN, STD
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation.color_changes import PERTURBATIONS, perturb
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel, mean_direction
from compressive.evaluation.results import Results
from compressive.evaluation.tasks import smoothness
from compressive.evaluation.tasks.smoothness import (
    LocalEstimates,
    Smoothness,
    histogram,
    keyed_sample,
    measure_smoothness,
)
from compressive.methods import build
from compressive.rng import image_keys

pytestmark = pytest.mark.usefixtures("one_thread")

stats: Any = scipy_stats  # its stubs accept only integer kappas
SIZE, DIM = 8, 16
NAMES = [each.name for each in PERTURBATIONS]


def random_images(count: int = 5, side: int = SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, side, side), generator=generator).to(torch.uint8)


def batch(images: Tensor, first: int = 0, height: int | None = None, width: int | None = None):
    one = torch.ones(len(images), dtype=torch.int64)
    index = torch.arange(first, first + len(images))
    sizes = one * (height or images.shape[2]), one * (width or images.shape[3])
    return Batch(images, *sizes, index, 0 * one, -one)


def network(side: int = SIZE, dim: int = DIM):
    """Return a float64 linear map from the normalized image to an unnormalized direction."""
    weight = torch.randn(3 * side * side, dim, generator=torch.Generator().manual_seed(1)).double()
    return lambda images: 5.0 + images.double().flatten(1) @ weight / side


def measure(images: Tensor | None = None, **settings) -> Smoothness:
    images = random_images() if images is None else images
    return measure_smoothness(network(), [batch(images)], **{"size": SIZE, **settings})


# Operators, one pixel at a time

STRENGTH = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}  # the paper's table


def changed(x: np.ndarray, name: str) -> np.ndarray:
    """Apply TensorFlow's adjust_brightness, _contrast, _saturation or _hue to a (3, h, w) image."""
    kind, amount = name[:-1], STRENGTH[name[:-1]] * (1 if name.endswith("+") else -1)
    if kind == "brightness":
        return np.clip(x + amount, 0, 1)
    if kind == "contrast":
        mean = x.mean((1, 2), keepdims=True)
        return np.clip(mean + (1 + amount) * (x - mean), 0, 1)
    out = np.empty_like(x)
    for i, j in np.ndindex(x.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*x[:, i, j])
        if kind == "saturation":
            s = min(s * (1 + amount), 1)
        else:
            h = (h + amount) % 1
        out[:, i, j] = colorsys.hsv_to_rgb(h, s, v)
    return np.clip(out, 0, 1)


@pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=NAMES)
def test_perturbations_match_the_paper(perturbation) -> None:
    """All eight agree to a few float32 rounding steps."""
    assert [f"{kind}{sign}" for kind in STRENGTH for sign in "+-"] == NAMES
    images = random_images().double() / 255
    ours = perturb(images.float(), perturbation)
    for image, one in zip(images.numpy(), ours, strict=True):
        np.testing.assert_allclose(one, changed(image, perturbation.name), rtol=0, atol=1e-6)


# Estimates


def directions(x: np.ndarray) -> np.ndarray:
    mean, std = (np.array(each)[:, None, None] for each in (MEAN, STD))
    mu = network()(torch.from_numpy((x - mean) / std)[None])[0].numpy()
    return mu / np.linalg.norm(mu)


@pytest.mark.parametrize("z", ["mode", "sample"])
@pytest.mark.parametrize("kappa", [10.0, 1024.0])
def test_estimates_match_scipy_log_densities(z, kappa: float) -> None:
    """Divide |log e(z|x) - log e(z|x')| by the L2 norm. Float32 pixels give five digits."""
    images = random_images()
    found = measure(images, z=z, kappa=kappa, seed=3).local
    for name in NAMES:
        for i, image in enumerate(images.double().numpy() / 255):
            other = changed(image, name)
            mu, mu_other = directions(image), directions(other)
            at = mu
            if z == "sample":
                keys = image_keys(torch.tensor([i]), seed=3, epoch=2**32 - 1, view=2**32 - 2)
                e = VonMisesFisher(torch.from_numpy(mu)[None], kappa)
                at = keyed_sample(e, keys)[0].numpy()
            log_ratio = abs(
                stats.vonmises_fisher(mu, kappa).logpdf(at)
                - stats.vonmises_fisher(mu_other, kappa).logpdf(at)
            )
            dx = other - image
            normalized = dx / np.array(STD)[:, None, None]
            kl = kappa * ratio(DIM, kappa) * (1 - mu @ mu_other)
            local = found[name]
            rel = 1e-4 if z == "sample" else 2e-5  # |z.(mu - mu')| can be close to 0
            expected = log_ratio / math.sqrt((dx**2).sum())
            assert local.value[i].item() == pytest.approx(expected, rel=rel)
            expected = log_ratio / np.linalg.norm(normalized)
            assert local.normalized[i].item() == pytest.approx(expected, rel=rel)
            assert local.squared[i].item() == pytest.approx(kl / (dx**2).sum(), rel=2e-5)


def test_squared_estimate_matches_kl_on_the_circle() -> None:
    """Compute KL[e || e'] on the circle by quadrature of scipy's densities."""

    def direction(images: Tensor) -> Tensor:
        angle = images.double().mean((1, 2, 3))
        return torch.stack([angle.cos(), angle.sin()], 1)

    flat = torch.full((1, 3, SIZE, SIZE), 102, dtype=torch.uint8)  # 0.4, then 0.8
    found = measure_smoothness(direction, [batch(flat)], size=SIZE, kappa=20.0).local["brightness+"]
    start, end = np.mean((0.4 - np.array(MEAN)) / STD), np.mean((0.8 - np.array(MEAN)) / STD)
    p, q = stats.vonmises(20.0, start), stats.vonmises(20.0, end)
    kl, _ = integrate.quad(
        lambda t: p.pdf(t) * (p.logpdf(t) - q.logpdf(t)), -math.pi, math.pi, points=[start]
    )
    assert found.squared.item() == pytest.approx(kl / (3 * SIZE**2 * 0.16), rel=1e-6)


def test_mean_z_scales_the_mode_estimate_by_the_vmf_mean_length() -> None:
    """The ratio is A_256(1024) = 0.8832, to the four digits in the specification."""
    direction, images = network(dim=256), [batch(random_images())]
    mode = measure_smoothness(direction, images, size=SIZE)
    mean = measure_smoothness(direction, images, size=SIZE, z="mean")
    for name in NAMES:
        share = mean.local[name].value / mode.local[name].value
        np.testing.assert_allclose(share, ratio(256, 1024), rtol=1e-9)
        np.testing.assert_allclose(share, 0.8832, atol=5e-5)
        assert torch.equal(mode.local[name].squared, mean.local[name].squared)


def test_estimates_scale_with_kappa_and_ignore_direction_norm() -> None:
    once = measure(kappa=100.0).local
    for other, factor in ((measure(kappa=300.0).local, 3.0), (measure(kappa=1.0).local, 0.01)):
        for name in NAMES:
            np.testing.assert_allclose(other[name].value, factor * once[name].value, rtol=1e-12)
    scaled = measure_smoothness(
        lambda x: 7 * network()(x), [batch(random_images())], size=SIZE, kappa=100.0
    )
    np.testing.assert_allclose(scaled.local["hue+"].value, once["hue+"].value, rtol=1e-9)


def test_estimate_is_symmetric() -> None:
    """102 gray levels are 0.4, so brightness+ inverts brightness- when no pixel is clipped."""
    dark = (random_images().double() * 0.6).to(torch.uint8)
    assert dark.max() <= 153
    brighter, darker = measure(dark).local["brightness+"], measure(dark + 102).local["brightness-"]
    np.testing.assert_allclose(brighter.value, darker.value, rtol=1e-5)
    np.testing.assert_allclose(brighter.squared, darker.squared, rtol=1e-5)


def test_small_changes_are_not_lost_in_rounding() -> None:
    """1 - cos of 1e-8 or less is exact for float32 directions, where 1 - mu.mu' would be noise."""

    def direction(images: Tensor) -> Tensor:
        gray = images.mean((1, 2, 3))
        return torch.stack([torch.ones_like(gray), 1e-4 * gray], 1)

    flat = torch.full((1, 3, SIZE, SIZE), 102, dtype=torch.uint8)  # 0.4, then 0.8
    local = measure_smoothness(direction, [batch(flat)], size=SIZE, kappa=1.0).local["brightness+"]
    change = 0.4 * np.mean(1 / np.array(STD)) * 1e-4
    expected = 0.5 * change**2 / math.sqrt(3 * SIZE**2 * 0.16)  # angle^2 / 2
    assert 0.5 * change**2 < 2e-8
    assert local.value.item() == pytest.approx(expected, rel=1e-5)


def test_unchanged_images_are_dropped_and_counted() -> None:
    """Gray has no hue, flat has no contrast, white cannot be brighter, despite resize rounding."""
    gray = random_images(1, 40)[:, :1].expand(1, 3, 40, 40)
    white, black = torch.full((2, 1, 3, 40, 40), 255, dtype=torch.uint8)
    flat = torch.tensor([200, 100, 37], dtype=torch.uint8)[None, :, None, None].expand_as(gray)
    images = torch.cat([gray, white, 0 * black, flat, random_images(1, 40)])
    found = measure_smoothness(network(33), [batch(images)], size=33).local
    kept = {name: local.index.tolist() for name, local in found.items()}
    assert kept == {
        "brightness+": [0, 2, 3, 4],
        "brightness-": [0, 1, 3, 4],
        **{f"contrast{sign}": [0, 4] for sign in "+-"},
        **{f"{kind}{sign}": [3, 4] for kind in ("saturation", "hue") for sign in "+-"},
    }
    for local in found.values():
        assert local.dropped == 5 - len(local.index)
        assert {len(each) for each in local[:4]} == {len(local.index)}
        assert local.mean == pytest.approx(np.mean(local.value.tolist()))
        assert local.bound == pytest.approx(max(local.squared.tolist()) ** 0.5)
        assert (local.value > 0).all()


def test_estimate_of_no_images_is_nan() -> None:
    found = measure(random_images(2)[:, :1].expand(2, 3, SIZE, SIZE)).local["hue+"]
    assert found.dropped == 2
    assert math.isnan(found.mean)
    assert math.isnan(found.bound)


@pytest.mark.parametrize("z", ["mode", "sample", "mean"])
def test_estimates_do_not_depend_on_batching_or_padding(z) -> None:
    images = random_images(7, 20)[:, :, :16, :18]
    canvas = torch.nn.functional.pad(images, (0, 6, 0, 8))
    whole = measure_smoothness(network(12), [batch(images)], size=12, z=z).local
    parts = [batch(canvas[i:j], i, 16, 18) for i, j in ((0, 1), (1, 5), (5, 7))]
    split = measure_smoothness(network(12), parts, size=12, z=z).local
    other = measure_smoothness(network(12), parts, size=12, z=z, seed=1).local
    for name in NAMES:
        for one, same in zip(whole[name][:4], split[name][:4], strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-4)  # float32 pixels, see above
        assert torch.equal(split[name].value, other[name].value) == (z != "sample")


def test_only_the_network_runs_in_bfloat16() -> None:
    linear = torch.nn.Linear(3 * SIZE**2, DIM)
    seen = set()

    def direction(images: Tensor) -> Tensor:
        out = linear(images.flatten(1))
        seen.add(out.dtype)
        return out

    plain = measure_smoothness(direction, [batch(random_images())], size=SIZE)
    half = measure_smoothness(
        direction, [batch(random_images())], size=SIZE, precision=torch.bfloat16
    )
    assert seen == {torch.float32, torch.bfloat16}
    assert half.protocol["precision"] == "bfloat16"
    for name in ("brightness-", "contrast+"):
        assert half.local[name].value.dtype == torch.float64
        # With 8-bit mantissas, 1 - cos of 0.02 or more is accurate to a few percent.
        assert half.local[name].mean == pytest.approx(plain.local[name].mean, rel=0.05)


def test_protocol_records_the_settings() -> None:
    protocol = measure(kappa=16384.0, z="mean", seed=4).protocol
    assert json.loads(json.dumps(protocol)) == protocol
    recorded = {key: protocol[key] for key in ("kappa", "z", "seed", "images", "precision")}
    assert list(recorded.values()) == [16384.0, "mean", 4, 5, "float32"]
    assert "L2 over all 192 values" in protocol["norm"]
    assert "[0, 1]" in protocol["unit"]
    assert protocol["perturbations"]["contrast-"] == 0.6


# Keyed samples


@pytest.mark.parametrize(("dim", "kappa"), [(3, 5.0), (16, 10.0), (129, 1024.0)])
def test_keyed_samples_follow_the_vmf_distribution(dim: int, kappa: float) -> None:
    count = 4000
    mu = unit(torch.arange(1.0, dim + 1).double(), dim=0).expand(count, dim)
    keys = image_keys(torch.arange(count), seed=0)
    z = keyed_sample(VonMisesFisher(mu, kappa), keys)
    cosine = (z * mu).sum(1)
    np.testing.assert_allclose(z.norm(dim=1), 1, atol=1e-12)
    assert CosineLaw(dim, kappa).ks(torch.arccos(cosine.clamp(-1, 1)).numpy()) > 0.01
    # Tangent directions are uniform around mu: mean 0 and covariance I / (dim - 1).
    tangent = unit(z - cosine[:, None] * mu, dim=1)
    assert tangent.mean(0).norm() < 5 / math.sqrt(count)
    across = torch.linalg.eigvalsh(tangent.T @ tangent / count)[1:] * (dim - 1)
    assert (across - 1).abs().max() < 5 * math.sqrt(dim / count)
    some = keyed_sample(VonMisesFisher(mu[5:9], kappa), keys[5:9])
    np.testing.assert_allclose(some, z[5:9], rtol=0, atol=1e-12)


# Histograms


def test_histogram_matches_numpy() -> None:
    """Numpy normalizes the density over values within the bins; `histogram` uses all values."""
    rng = np.random.default_rng(0)
    values = rng.gamma(2, 0.1, 5000)
    edges, density, beyond = histogram(torch.from_numpy(values))
    top = np.percentile(values, 99.5)
    assert len(edges) == 101
    reference, reference_edges = np.histogram(values, 100, (0, top), density=True)
    np.testing.assert_allclose(edges, reference_edges, rtol=1e-12)
    assert beyond == pytest.approx((values > top).mean(), rel=1e-12)
    np.testing.assert_allclose(density, reference * (1 - beyond), rtol=1e-9)
    assert (density * edges.diff()).sum().item() + beyond == pytest.approx(1, rel=1e-9)
    assert beyond == pytest.approx(0.005, abs=1 / 5000)


def test_histogram_of_zeros_and_with_few_bins() -> None:
    zeros = histogram(torch.zeros(4), bins=10)
    assert zeros.density.tolist() == [10.0] + [0.0] * 9  # all in the first of 10 bins on [0, 1]
    assert len(histogram(torch.rand(9), bins=3).density) == 3


def test_constant_direction_has_zero_estimate() -> None:
    found = measure_smoothness(lambda x: torch.ones(len(x), 4), [batch(random_images())], size=SIZE)
    for local in found.local.values():
        assert isinstance(local, LocalEstimates)
        assert local.mean == local.bound == 0


def test_invalid_arguments_are_refused() -> None:
    for call, message in [
        (lambda: measure(kappa=0.0), "kappa .*got 0.0"),
        (lambda: measure(z="median"), "z .*mode, sample, mean.*'median'"),
        (
            lambda: measure_smoothness(network(), [], size=SIZE),
            "batches .*one image",
        ),
        (lambda: histogram(torch.zeros(0)), r"values .*got \(0,\)"),
        (lambda: histogram(torch.ones(1, 2)), r"values .*got \(1, 2\)"),
        (lambda: histogram(torch.ones(2), bins=0), "bins .*got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_task_records_match_measure_smoothness(tmp_path: Path) -> None:
    """Use the model's antialiasing on images larger than its input size."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                noise(40, 40, seed=i).save(tmp_path / split / name / f"{i}.png")
    method = build(tiny("method=simclr")).eval()
    network = Mean().eval()
    model = FrozenModel(name="a", network=network, size=16, side=40, antialias=True, method=method)
    splits = open_splits(str(tmp_path), seed=0)
    context = EvalContext(model, splits, Results("a"), device=torch.device("cpu"))
    smoothness.run(context)
    batches = context.batches_at("test", torch.arange(4))
    truth = measure_smoothness(mean_direction(method), batches, size=16, antialias=True).local
    found = {(r.task, r.metric): r for r in context.results.records if r.dataset.endswith(" test")}
    for name, local in truth.items():
        one = found[f"smoothness {name}", "lipschitz"]
        assert one.value == pytest.approx(float(local.value.mean()), rel=1e-6)
        normalized = one.protocol["mean_in_normalized_units"]
        assert normalized == pytest.approx(float(local.normalized.mean()), rel=1e-6)
        two = found[f"smoothness {name}", "lipschitz_squared_kl"]
        assert two.value == pytest.approx(float(local.squared.mean()), rel=1e-6)
        assert two.protocol["largest"] == pytest.approx(float(local.squared.max()), rel=1e-6)
    mean = np.mean([float(local.value.mean()) for local in truth.values()])
    assert found["smoothness", "lipschitz"].value == pytest.approx(mean, rel=1e-6)
    context.close()


def test_mean_over_changes_uses_images_that_each_of_them_affects(tmp_path: Path) -> None:
    """Gray images have no hue; a split of gray images has only the other four changes."""
    for split, count in (("train", 4), ("test", 2)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                image = noise(16, 16, seed=i)
                image = image.convert("L").convert("RGB") if i < 2 else image
                image.save(tmp_path / split / name / f"{i}.png")
    context = context_of(tmp_path, method=build(tiny()))
    smoothness.run(context)
    found = {r.dataset.split()[-1]: r for r in context.results.records if r.task == "smoothness"}
    assert {split: (r.n, r.protocol["changes"]) for split, r in found.items()} == {
        "train": (4, 8),
        "test": (4, 4),
    }
    context.close()


def test_default_image_counts_match_the_paper(tmp_path: Path) -> None:
    assert smoothness.PAPER_IMAGES == {"train": 10_000, "test": 50_000}
    context = context_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 2, "b": 3}), method=build(tiny()))
    smoothness.run(context)
    assert {record.n for record in context.results.records} == {4, 5}
    smoothness.run(context, images={"train": 3, "test": 2})
    assert {record.n for record in context.results.records} == {3, 2}
    context.close()
