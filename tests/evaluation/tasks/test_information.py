"""Information on held-out pairs matches the objectives and has no side effects."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact import ratio
from scipy import special
from tiny import tiny
from tiny_context import context_of, place
from torch import Tensor, nn

from compressive.augment.ops import augment
from compressive.augment.params import paper_views
from compressive.config import METHODS, is_compressed
from compressive.data.loaders import Batch
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation.color_changes import PERTURBATIONS
from compressive.evaluation.frozen_model import mean_direction
from compressive.evaluation.tasks import information
from compressive.evaluation.tasks.information import measure_information
from compressive.evaluation.tasks.smoothness import keyed_sample, measure_smoothness
from compressive.methods import Bootstrap, Contrastive, build
from compressive.objectives import csimclr_loss
from compressive.rng import image_keys

BOOTSTRAPS = ("c-byol", "c-simsiam")
INFO_NCE = ("simclr", "c-simclr", "moco-v3", "c-moco-v3")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, COUNT = 16, 6
PAIR = paper_views()
HELD = 2**32 - 1


def make_method(name: str, *changes: str) -> Any:
    """Build a method in training mode with random statistics in every batch norm."""
    torch.manual_seed(0)
    method = build(tiny(f"method={name}", *changes))
    for part in method.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.running_mean is not None:
            nn.init.normal_(part.running_mean, std=0.3)
    return method


def make_batch(count: int = COUNT, first: int = 0) -> Batch:
    one = torch.ones(count, dtype=torch.int64)
    all_images = torch.randint(256, (20, 3, 20, 20), generator=torch.Generator().manual_seed(0))
    images = all_images[first : first + count]
    index = torch.arange(first, first + count)
    return Batch(images.to(torch.uint8), 18 * one, 20 * one, index, 0 * one, -one)


def views(batch: Batch, seed: int = 0, draw: int = 0) -> list[Tensor]:
    """Return the two views, each augmented separately."""
    pair = []
    for number, view in enumerate(PAIR):
        keys = image_keys(batch.index, seed=seed, epoch=HELD, view=2 * draw + number)
        sizes = batch.height, batch.width
        pair.append(augment(batch.images, keys, view, SIZE, height=sizes[0], width=sizes[1]))
    return pair


def measure(method, batches: list[Batch] | None = None, **settings) -> Any:
    batches = [make_batch()] if batches is None else batches
    return measure_information(method, batches, PAIR, **{"size": SIZE, **settings})


def close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert isinstance(actual, Tensor)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


# Values


def test_csimclr_matches_the_objective_image_by_image() -> None:
    """Compute two draws of views and z by hand and average them."""
    method = make_method("c-simclr").eval()
    assert isinstance(method, Contrastive)
    found = measure(method, seed=5, draws=2)
    expected = []
    for draw in (0, 1):
        with torch.no_grad():
            r = [method.projection(method.encoder(view)) for view in views(make_batch(), 5, draw)]
        z = []
        for number, each in enumerate(r):
            keys = image_keys(torch.arange(COUNT), seed=5, epoch=HELD - 1, view=2 * draw + number)
            z.append(keyed_sample(VonMisesFisher(F.normalize(each, dim=1), 1024.0), keys))
        zs = {"z_x": z[0], "z_y": z[1]}
        loss = csimclr_loss(
            r[0], r[1], kappa_e=1024.0, kappa_b=10.0, residual_estimator="analytic", **zs
        )
        expected.append(
            (
                F.cosine_similarity(*r),
                (loss.residual_x + loss.residual_y) / 2,
                loss.reducible_residual,
                (loss.predictive_x + loss.predictive_y) / 2,
            )
        )
        bound = loss.bound
    for actual, one, other in zip(found[1:5], *expected, strict=True):
        close(actual, (one + other) / 2)
    assert found.bound == bound == pytest.approx(math.log(2 * COUNT - 1))
    assert found.index.tolist() == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backward_view"),
    [(name, "own") for name in METHODS] + [(c, "other") for c in BOOTSTRAPS],
)
def test_means_match_a_training_step_in_eval_mode(name: str, backward_view: str) -> None:
    """With z at its mode nothing is sampled, so a step in eval mode gives the same values."""
    config = tiny(f"method={name}")
    mode = [
        "bottleneck.stochastic=false",
        "bottleneck.residual_estimator=analytic",
        f"bottleneck.backward_view={backward_view}",
    ]
    method = make_method(name, *(mode if is_compressed(config) else []))
    found = measure(method)
    with torch.no_grad():
        step = method.eval()(views(make_batch()), 1.0)
    checked = set()
    for field in ("positive_cosine", "residual", "reducible_residual", "predictive"):
        values, expected = getattr(found, field), getattr(step, field)
        assert (values is None) == (expected is None)
        if values is not None:
            assert len(values) == COUNT
            close(values.mean(), expected)
            checked.add(field)
    assert ("predictive" in checked) == (name in INFO_NCE)
    assert ("residual" in checked) == ("reducible_residual" in checked) == is_compressed(config)
    assert (found.bound is None) == (name not in INFO_NCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c-simclr", "c-moco-v3", "c-byol", "c-simsiam"])
def test_residual_is_the_expectation_over_z(name: str) -> None:
    """It equals a step with residual_estimator=analytic, although training uses samples."""
    found = measure(make_method(name))
    with torch.no_grad():
        step = make_method(name, "bottleneck.residual_estimator=analytic").eval()(
            views(make_batch()), 1.0
        )
    close(found.residual.mean(), step.residual)


def log_constant(n: int, kappa: float) -> float:
    """Return log C_n(kappa) from scipy."""
    bessel = math.log(special.ive(n / 2 - 1, kappa)) + kappa
    return (n / 2 - 1) * math.log(kappa) - n / 2 * math.log(2 * math.pi) - bessel


def test_cbyol_residual_matches_closed_form_kl() -> None:
    """KL[e || b] = kappa_e A - kappa_b A cos + log C_e - log C_b, with b from the target."""
    method = make_method("c-byol", "bottleneck.kappa_e=16384", "bottleneck.kappa_b=10").eval()
    assert isinstance(method, Bootstrap)
    assert method.target is not None
    assert method.backward_encoder is not None
    found = measure(method)
    residual, reducible_residual = [], []
    for view in views(make_batch()):
        with torch.no_grad():
            e = F.normalize(method.predictor(method.projection(method.encoder(view))), dim=1)
            b = method.backward_encoder(F.normalize(method.target(view), dim=1))
        cosine = (e * F.normalize(b, dim=1)).sum(1).double().numpy()
        a = ratio(8, 16384.0)
        floor = (16384 - 10) * a + log_constant(8, 16384.0) - log_constant(8, 10.0)
        residual.append(floor + 10 * a * (1 - cosine))
        reducible_residual.append(10 * a * (1 - cosine))
    # Float32 rounding near 20 nats, and float32 cosines.
    close(found.residual, torch.from_numpy(np.mean(residual, 0)).float(), atol=2e-5)
    close(
        found.reducible_residual,
        torch.from_numpy(np.mean(reducible_residual, 0)).float(),
        atol=1e-5,
    )


def test_perfect_encoder_nearly_reaches_the_predictive_bound() -> None:
    """If each image has its own axis, the value is log K - log(1 + (K - 1) e^-kappa_b)."""

    class Axis(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.eye(COUNT).repeat(2, 1) + 0 * images.mean()

    found = measure(Contrastive(Axis(), nn.Identity(), kappa_b=10.0))
    assert found.bound == pytest.approx(math.log(2 * COUNT - 1))
    expected = math.log(2 * COUNT - 1) - math.log1p((2 * COUNT - 2) * math.exp(-10))
    close(found.predictive, torch.full((COUNT,), expected))
    close(found.positive_cosine, torch.ones(COUNT))


# Batches and seeds


def test_short_last_batch_is_dropped() -> None:
    method = make_method("c-simclr")
    batches = [make_batch(4), make_batch(4, 4), make_batch(3, 8)]
    found, whole = measure(method, batches), measure(method, batches[:2])
    assert (found.dropped, whole.dropped) == (3, 0)
    assert found.index.tolist() == list(range(8))
    assert found.protocol["batch"] == 4
    assert found.bound == pytest.approx(math.log(7))
    for one, other in zip(found[:5], whole[:5], strict=True):
        close(one, other, rtol=0, atol=0)


def test_per_image_terms_do_not_depend_on_batching() -> None:
    """All terms of C-BYOL and all but `predictive` of C-SimCLR; rounding depends on batch size."""
    byol = make_method("c-byol")
    whole, split = (
        measure(byol, [make_batch(7)]),
        measure(byol, [make_batch(4), make_batch(3, 4)]),
    )
    assert (split.dropped, split.predictive) == (0, None)
    for one, other in zip(whole[1:4], split[1:4], strict=True):
        close(other, one, rtol=1e-4, atol=1e-4)
    simclr = make_method("c-simclr")
    whole, split = (
        measure(simclr, [make_batch(8)]),
        measure(simclr, [make_batch(4), make_batch(4, 4)]),
    )
    for one, other in zip(whole[1:4], split[1:4], strict=True):
        close(other, one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole.predictive, split.predictive)


def test_seed_is_reproducible_and_keeps_global_rng_state() -> None:
    method = make_method("c-simclr")
    state = torch.get_rng_state()
    once, again, other = measure(method), measure(method), measure(method, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    close(again.predictive, once.predictive, rtol=0, atol=0)
    assert not torch.allclose(once.predictive, other.predictive)
    assert json.loads(json.dumps(once.protocol)) == once.protocol
    assert once.protocol | {"seed": 1} == other.protocol


def test_protocol_records_the_augmentations() -> None:
    """Weaker augmentations give other values, so the record must name them."""
    weaker = paper_views(crop_scale_min=0.9)
    found = measure_information(make_method("simclr"), [make_batch()], weaker, size=SIZE)
    assert found.protocol["views"] == [asdict(view) for view in weaker]
    assert [
        view["crop_scale_min"] for view in measure(make_method("simclr")).protocol["views"]
    ] == [0.08, 0.08]


def test_bfloat16_networks_return_float32_values() -> None:
    plain, half = (
        measure(make_method("c-simclr")),
        measure(make_method("c-simclr"), precision=torch.bfloat16),
    )
    for one, other in zip(plain[1:5], half[1:5], strict=True):
        # assert_close also compares dtypes. 8 bits per layer give cosines to about 0.01.
        close(other, one, rtol=0.05, atol=0.15)
        assert not torch.equal(one, other)


# No side effects


@pytest.mark.parametrize("name", ["c-moco-v3", "c-byol"])
def test_method_state_is_unchanged(name: str) -> None:
    method = make_method(name)
    method.predictor.eval()  # pyright: ignore[reportOptionalMemberAccess]
    modes = [part.training for part in method.modules()]
    assert len(set(modes)) == 2
    before = {key: value.clone() for key, value in method.state_dict().items()}
    measure(method)
    mean_direction(method)(views(make_batch())[0])
    assert [part.training for part in method.modules()] == modes
    for key, value in method.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(weight.grad is None for weight in method.parameters())


def test_buffer_change_is_detected_and_train_mode_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, images: Tensor) -> Tensor:
            self.seen += 1
            return images.mean((2, 3))

    method = Contrastive(Counts(), nn.Identity())
    with pytest.raises(AssertionError, match="seen changed"):
        measure(method)
    assert method.training


# Directions


@pytest.mark.parametrize("name", ["c-simclr", "moco-v3", "c-byol", "simsiam"])
def test_mean_direction_matches_projection_and_predictor(name: str) -> None:
    method = make_method(name)
    x = views(make_batch())[0]
    found = mean_direction(method)(x)
    assert method.training
    with torch.no_grad():
        expected = method.eval().projection(method.encoder(x))
        if name != "c-simclr":
            assert method.predictor is not None
            expected = method.predictor(expected)
    close(found, expected / expected.norm(dim=1, keepdim=True))
    assert not found.requires_grad


def test_mean_direction_works_with_smoothness() -> None:
    found = measure_smoothness(mean_direction(make_method("c-simclr")), [make_batch()], size=SIZE)
    assert list(found.local) == [each.name for each in PERTURBATIONS]
    assert all(local.mean > 0 and local.dropped == 0 for local in found.local.values())


def test_invalid_arguments_are_refused() -> None:
    method = make_method("simclr")
    with pytest.raises(ValueError, match=r"draws .*got 0"):
        measure(method, draws=0)
    with pytest.raises(ValueError, match=r"batches .*one image"):
        measure(method, [])
    with pytest.raises(ValueError, match="antialias"):
        measure_information(
            method, [make_batch()], (PAIR[0], replace(PAIR[1], antialias=True)), size=SIZE
        )


def test_view_pairs_depend_on_the_seed(tmp_path: Path) -> None:
    place(tmp_path, {"a": 3, "b": 3}, {"a": 3, "b": 3})
    config = tiny("method=c-simclr")
    values = []
    for seed in (0, 3):
        torch.manual_seed(0)
        context = context_of(tmp_path, method=build(config).eval(), config=config)
        context.seed = seed
        information.run(context)
        found = {r.metric: r for r in context.results.records}
        assert found["reducible_residual"].protocol["seed"] == seed
        values.append(found["positive_cosine"].value)
        context.close()
    assert values[0] != values[1]


def test_batches_mix_classes_of_a_sorted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches of four; in file-name order each batch would have a single class."""
    place(tmp_path, {"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 4, "c": 4})
    seen: list[list[int]] = []

    def record_labels(method: Any, batches: Any, *_: Any, **settings: Any) -> Any:
        whole = list(batches)
        seen.extend(batch.label.tolist() for batch in whole)
        return measure_information(method, whole, *_, **settings)

    monkeypatch.setattr(information, "measure_information", record_labels)
    config = tiny("method=c-simclr")
    context = context_of(tmp_path, method=build(config).eval(), config=config)
    information.run(context, batch_size=4)
    context.close()
    assert sorted(label for labels in seen for label in labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(len(set(labels)) > 1 for labels in seen)


def test_limited_images_are_the_first_of_the_shuffled_ones(tmp_path: Path) -> None:
    """Two of three batches are measured; the values of their images do not change."""
    place(tmp_path, {"a": 6, "b": 6}, {"a": 6, "b": 6})
    config = tiny("method=c-simclr")
    found = []
    for images in (8, 0):
        torch.manual_seed(0)
        context = context_of(tmp_path, method=build(config).eval(), config=config)
        information.run(context, batch_size=4, images=images)
        found.append(context.results.values)
        context.close()
    limited, whole = found
    assert {len(values) for values in limited.values()} == {8}
    for name, values in limited.items():
        assert values.tolist() == whole[name][:8].tolist()
