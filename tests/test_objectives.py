"""The four losses against the official code, the paper's equations and each other."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import golden_arrays, golden_json, unit_vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressive import VonMisesFisher
from compressive.distributions import special
from compressive.objectives import (
    ResidualEstimator,
    byol_loss,
    cbyol_loss,
    compress,
    csimclr_loss,
    expected_residual_information,
    info_nce,
    residual_information,
    simclr_loss,
)

CONTRASTIVE = golden_json("contrastive")
BYOL = golden_json("byol")
ARRAYS = golden_arrays("contrastive")
BYOL_ARRAYS = golden_arrays("byol")

# The official code computes log C + kappa mu.z from numbers of size kappa_e (up to 32768) in
# float64. Its own losses therefore have errors of up to 1e-11, and so do its gradients, where
# kappa_e |mu|^2 cancels. Both bounds are those of the issue.
EXACT = 1e-10


def projections(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    r[1] += 0.7 * r[0]
    return [(3 * x).to(dtype).requires_grad_() for x in r]


def close(ours: Tensor, official: float | Tensor) -> None:
    torch.testing.assert_close(
        ours, torch.as_tensor(official, dtype=torch.float64), rtol=EXACT, atol=EXACT
    )


# The official code


def official_sample(mu: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Apply the reflection that takes the first axis to mu to given noise."""
    s = torch.cat([w[:, None], torch.sqrt(1 - w[:, None] ** 2) * v], dim=1)
    u = F.normalize(torch.eye(mu.shape[1], dtype=mu.dtype)[0] - mu, dim=-1)
    return s - 2 * (s * u).sum(-1, keepdim=True) * u


def ours_for(case: dict[str, Any], r_x: Tensor, r_y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    own = case["double_batch_trick"]
    if case["fn"] == "add_contrastive_loss":
        out = simclr_loss(r_x, r_y, temperature=case["temperature"], own_view_negatives=own)
        predictive = {"i_y_zx": -out.nll_x + out.bound, "i_x_zy": -out.nll_y + out.bound}
        assert torch.equal(predictive["i_y_zx"], out.predictive_x)
        return out.loss, predictive
    z_x, z_y = F.normalize(r_x, dim=-1), F.normalize(r_y, dim=-1)
    if case["sampling"]:
        noise = {name: ARRAYS[f"{case['id']}/{name}"] for name in ("w_x", "v_x", "w_y", "v_y")}
        z_x = official_sample(z_x, noise["w_x"], noise["v_x"])
        z_y = official_sample(z_y, noise["w_y"], noise["v_y"])
    kappas = {name: case[name] for name in ("kappa_e", "kappa_b", "beta")}
    out = csimclr_loss(r_x, r_y, **kappas, z_x=z_x, z_y=z_y, own_view_negatives=own)
    loss = out.loss
    if not case["bidirectional"]:
        loss = (case["beta"] * out.residual_x - out.predictive_x).mean()
    metrics = {
        "i_xzx_y": out.residual_x,
        "i_y_zx": out.predictive_x,
        "h_e_zx_x": out.entropy_e,
        "h_b_zx_y": out.entropy_b,
        "i_yzy_x": out.residual_y,
        "i_x_zy": out.predictive_y,
    }
    return loss, metrics


def test_golden_files_are_complete() -> None:
    assert len(CONTRASTIVE) == 168
    assert len(BYOL) == 18
    # An ablation flag of the official code that the paper never uses and we do not support.
    assert sum(not case.get("hidden_norm", True) for case in BYOL) == 2
    assert sum(f"{case['id']}/grad" in ARRAYS for case in CONTRASTIVE) >= 100


@pytest.mark.parametrize("case", CONTRASTIVE, ids=lambda case: case["id"])
def test_contrastive_losses_match_the_official_code(case: dict[str, Any]) -> None:
    hidden = ARRAYS[case["hidden"]].clone().requires_grad_()
    loss, metrics = ours_for(case, *hidden.split(case["B"]))
    close(loss, case["loss"])
    for name, value in case["metrics"].items():
        close(metrics[name].mean(), value)
    if f"{case['id']}/grad" in ARRAYS:
        (grad,) = torch.autograd.grad(loss, hidden)
        close(grad, ARRAYS[f"{case['id']}/grad"])


@pytest.mark.parametrize(
    "case", [case for case in BYOL if case.get("hidden_norm")], ids=lambda case: case["id"]
)
def test_byol_loss_matches_the_official_code(case: dict[str, Any]) -> None:
    hidden = BYOL_ARRAYS[case["hidden"]].clone().requires_grad_()
    online, target = hidden.split(case["B"])
    out = byol_loss(online, target, weight=case["byol_loss_weight"])
    close(out.nll.mean() / case["byol_loss_weight"], case["metrics"]["byol_loss"])
    loss = out.loss
    close(loss, case["loss"])
    (grad,) = torch.autograd.grad(loss, hidden)
    close(grad, BYOL_ARRAYS[f"{case['id']}/grad"])


@pytest.mark.parametrize(
    "case",
    [case for case in BYOL if case["fn"] == "add_byol_ceb_loss"],
    ids=lambda case: case["id"],
)
def test_cbyol_loss_matches_the_official_code(case: dict[str, Any]) -> None:
    """Both directions; b(z|y) of the first uses target_proj_output2, as in the official code."""
    names = ("hidden", "hidden2", "target_proj_output", "target_proj_output2", "z_mu", "z_mu2")
    given = {name: BYOL_ARRAYS[f"{case['id']}/{name}"].clone().requires_grad_() for name in names}
    settings = {name: case[name] for name in ("kappa_e", "kappa_b", "beta")}
    loss = torch.zeros((), dtype=torch.float64)
    for suffix, other in (("", "2"), ("2", "")):
        y_hat, y_prime = given[f"hidden{suffix}"].split(case["B"])
        z, mu_e = given[f"z_mu{suffix}"].split(case["dim"], dim=-1)
        out = cbyol_loss(
            mu_e,
            given[f"target_proj_output{other}"],
            y_hat,
            y_prime,
            z=z,
            weight=case["byol_loss_weight"],
            **settings,
        )
        loss = loss + out.loss
        if not suffix:
            close(out.residual.mean(), case["metrics"]["i_xzx_y"])
            close(out.entropy_e.mean(), case["metrics"]["h_e_zx_x"])
            close(out.entropy_b.mean(), case["metrics"]["h_b_zx_y"])
    close(loss, case["loss"])
    grads = dict(zip(names, torch.autograd.grad(loss, list(given.values())), strict=True))
    for name in names:
        official = BYOL_ARRAYS[f"{case['id']}/grad_{name}"]
        if name.startswith("z_mu"):
            # The official mu is normalized before the loss, ours inside. Compare what reaches the
            # projection: the part of the gradient along the sphere. z is the same.
            z_official, mu_official = official.split(case["dim"], dim=-1)
            z_ours, mu_ours = grads[name].split(case["dim"], dim=-1)
            mu = given[name].detach().split(case["dim"], dim=-1)[1]
            close(z_ours, z_official)
            close(mu_ours, mu_official - (mu_official * mu).sum(-1, keepdim=True) * mu)
        else:
            close(grads[name], official)


# The paper's equations, as naive loops in float64


def naive_log_density(z: Tensor, mu: Tensor, kappa: float) -> Tensor:
    k = torch.tensor(kappa, dtype=torch.float64)
    return special.log_normalizer(k, len(z)) + kappa * z.dot(mu)


def naive_direction(z, mu_own, mu_other, kappa_e, kappa_b, beta, own) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(z)):
        residual = naive_log_density(z[i], mu_own[i], kappa_e)
        residual = residual - naive_log_density(z[i], mu_other[i], kappa_b)
        candidates = [naive_log_density(z[i], mu, kappa_b).exp() for mu in mu_other]
        if own:
            others = [k for k in range(len(z)) if k != i]
            candidates += [naive_log_density(z[i], mu_own[k], kappa_b).exp() for k in others]
        positive = naive_log_density(z[i], mu_other[i], kappa_b).exp()
        predictive = torch.log(positive / (sum(candidates) / len(candidates)))
        total = total + beta * residual - predictive
    return total / len(z)


@pytest.mark.parametrize("own", [True, False])
def test_csimclr_matches_the_papers_equation(own: bool) -> None:
    r_x, r_y = projections(5, 8)
    mu_x, mu_y = F.normalize(r_x, dim=-1), F.normalize(r_y, dim=-1)
    z_x, z_y = unit_vectors(2, 5, 8, seed=4)
    settings: dict[str, Any] = {"kappa_e": 30.0, "kappa_b": 4.0, "beta": 0.3}
    naive = naive_direction(z_x, mu_x, mu_y, **settings, own=own)
    naive = naive + naive_direction(z_y, mu_y, mu_x, **settings, own=own)
    ours = csimclr_loss(r_x, r_y, z_x=z_x, z_y=z_y, own_view_negatives=own, **settings).loss
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(loss, (r_x, r_y)) for loss in (ours, naive)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 16), st.sampled_from([2, 3, 64]), st.floats(0.5, 50.0), st.booleans())
def test_csimclr_at_beta_zero_is_simclr(batch: int, dim: int, kappa_b: float, own: bool) -> None:
    """At beta = 0 and z at its mode, it is SimCLR at temperature 1 / kappa_b, minus 2 log K."""
    r_x, r_y = projections(batch, dim)
    z: dict[str, Any] = {"z_x": F.normalize(r_x, dim=-1), "z_y": F.normalize(r_y, dim=-1)}
    ours = csimclr_loss(r_x, r_y, kappa_b=kappa_b, beta=0.0, own_view_negatives=own, **z)
    simclr = simclr_loss(r_x, r_y, temperature=1 / kappa_b, own_view_negatives=own)
    torch.testing.assert_close(ours.loss + 2 * ours.bound, simclr.loss, rtol=1e-12, atol=1e-11)
    assert ours.bound == simclr.bound == math.log(2 * batch - 1 if own else batch)


def test_simclr_is_cross_entropy() -> None:
    mu_x, mu_y = unit_vectors(2, 6, 16)
    out = simclr_loss(2 * mu_x, 3 * mu_y, temperature=0.2, own_view_negatives=False)
    logits = mu_x @ mu_y.T / 0.2
    labels = torch.arange(6)
    exact = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
    torch.testing.assert_close(out.loss, exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        out.nll_x, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-13, atol=0
    )


def test_cbyol_at_beta_zero_is_byol() -> None:
    (mu_e, mu_b), (y_hat, y) = projections(6, 8), projections(6, 5, seed=1)
    out = cbyol_loss(mu_e, mu_b, y_hat, y, z=unit_vectors(6, 8), beta=0.0, weight=3.0)
    byol = byol_loss(y_hat, y, weight=3.0)
    assert torch.equal(out.loss, byol.loss)
    cosine = F.cosine_similarity(y_hat, y)
    torch.testing.assert_close(byol.nll, 3 * (2 - 2 * cosine), rtol=1e-13, atol=1e-14)


# Residual and its estimators


@pytest.mark.slow
def test_analytic_residual_is_the_mean_of_the_sampled_one() -> None:
    """A residual depends on its own image only, so repeated images are repeated draws."""
    r_x, r_y = projections(4, 64)
    settings: dict[str, Any] = {"kappa_e": 256.0, "kappa_b": 8.0}
    closed = csimclr_loss(r_x, r_y, residual_estimator="analytic", **settings)
    rows = r_x.repeat(150, 1), r_y.repeat(150, 1)
    out = [csimclr_loss(*rows, **settings) for _ in range(10)]
    draws = torch.cat([each.residual_x for each in out]).view(1500, 4)
    error = (draws.mean(0) - closed.residual_x).abs() / (draws.std(0) / math.sqrt(1500))
    assert error.max() < 5
    entropies = torch.cat([each.entropy_e for each in out])
    error = (entropies.mean() - closed.entropy_e.mean()).abs() / entropies.std()
    assert error < 5 / math.sqrt(6000)


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_both_estimators_have_the_same_expected_gradient(rate: ResidualEstimator) -> None:
    """The residual contributes only -beta kappa_b A(kappa_e) cos(mu_e, mu_b)."""
    r_x, r_y = projections(3, 16)
    kappa_e, kappa_b, draws = 50.0, 5.0, 1000
    a = special.constants(kappa_e, 16).mean_resultant_length
    exact = torch.autograd.grad(-kappa_b * a * F.cosine_similarity(r_x, r_y).sum(), (r_x, r_y))
    rows = [r.detach().repeat(draws // 5, 1).requires_grad_() for r in (r_x, r_y)]
    each = []
    for _ in range(5):
        out = csimclr_loss(*rows, kappa_e=kappa_e, kappa_b=kappa_b, residual_estimator=rate)
        grads = torch.autograd.grad(out.residual_x.sum(), rows)
        each.append(torch.stack([grad.view(-1, 3, 16) for grad in grads], dim=1))
    sample = torch.cat(each)
    assert len(sample) == draws
    if rate == "analytic":
        torch.testing.assert_close(sample[0], torch.stack(exact), rtol=1e-12, atol=1e-13)
    else:
        error = (sample.mean(0) - torch.stack(exact)).abs() / (sample.std(0) / math.sqrt(draws))
        assert error.max() < 5


def test_analytic_residual_reduces_gradient_noise() -> None:
    """At kappa_e = 1024 it falls to about 0.36; 20 draws measure it to a tenth."""
    r_x, r_y = projections(64, 256)
    rates: list[ResidualEstimator] = ["sampled", "analytic"]
    spread = []
    for rate in rates:
        draws = [csimclr_loss(r_x, r_y, residual_estimator=rate).loss for _ in range(20)]
        grads = torch.stack([torch.autograd.grad(loss, r_x)[0] for loss in draws])
        noise = torch.linalg.vector_norm(grads - grads.mean(0), dim=(1, 2)).mean()
        spread.append((noise / torch.linalg.vector_norm(grads.mean(0))).item())
    assert spread[1] / spread[0] == pytest.approx(0.36, abs=0.04)


def test_reducible_residual_is_the_residual_above_its_floor() -> None:
    r_x, r_y = projections(5, 32)
    out = csimclr_loss(r_x, r_y, residual_estimator="analytic")
    same = csimclr_loss(r_x, r_x, residual_estimator="analytic")
    torch.testing.assert_close(
        out.reducible_residual, out.residual_x - same.residual_x, rtol=1e-10, atol=1e-10
    )
    assert same.reducible_residual.abs().max() == 0
    e = VonMisesFisher(F.normalize(r_x, dim=-1), 1024.0)
    b = VonMisesFisher(F.normalize(r_y, dim=-1), 10.0)
    torch.testing.assert_close(out.residual_x, expected_residual_information(e, b))
    torch.testing.assert_close(out.entropy_b, out.entropy_e + out.residual_x)


def test_cbyol_residual_matches_mpmath() -> None:
    """Residual at equal means, n = 256, kappa_e = 16384, kappa_b = 10: 522.4 nats (mpmath)."""
    mu = unit_vectors(4, 256)
    y = unit_vectors(4, 256, seed=2)
    out = cbyol_loss(mu, 3 * mu, y, y, z=mu, residual_estimator="analytic")
    assert out.residual.tolist() == pytest.approx([522.4] * 4, abs=0.05)
    assert out.reducible_residual.abs().max() < 1e-12
    assert out.nll.abs().max() < 1e-12
    torch.testing.assert_close(out.entropy_b, out.entropy_e + out.residual)


def test_missing_samples_are_drawn() -> None:
    r_x, r_y = projections(8, 32)
    torch.manual_seed(5)
    drawn = csimclr_loss(r_x, r_y)
    torch.manual_seed(5)
    z_x = VonMisesFisher(F.normalize(r_x, dim=-1), 1024.0).rsample()
    z_y = VonMisesFisher(F.normalize(r_y, dim=-1), 1024.0).rsample()
    given = csimclr_loss(r_x, r_y, z_x=z_x, z_y=z_y)
    torch.testing.assert_close(drawn.loss, given.loss, rtol=1e-14, atol=0)
    grads = [torch.autograd.grad(out.loss, (r_x, r_y)) for out in (drawn, given)]
    for a, b in zip(*grads, strict=True):  # the first graph omits log e
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_compress_works_with_any_loss() -> None:
    r_x, r_y = projections(6, 16)
    e = VonMisesFisher(F.normalize(r_x, dim=-1), 100.0)
    b = VonMisesFisher(F.normalize(r_y, dim=-1), 10.0)
    z = e.rsample()
    nll = info_nce(z, b.mean_direction, 10.0, own=e.mean_direction)
    each = compress(nll, residual_information(z, e, b), 0.5)
    out = csimclr_loss(r_x, r_y, kappa_e=100.0, beta=0.5, z_x=z, z_y=z)
    torch.testing.assert_close(each.mean(), (out.nll_x + 0.5 * out.residual_x).mean())


def test_beta_may_be_a_tensor_updated_in_place() -> None:
    r_x, r_y = projections(4, 8)
    z_x, z_y = unit_vectors(2, 4, 8)
    number = csimclr_loss(r_x, r_y, beta=0.25, z_x=z_x, z_y=z_y).loss
    tensor = csimclr_loss(r_x, r_y, beta=torch.tensor(0.25).double(), z_x=z_x, z_y=z_y).loss
    assert torch.equal(number, tensor)


# Precision


def test_autocast_and_bfloat16_projections_lose_no_precision() -> None:
    """After bfloat16 projections, everything is float32, as if they had been cast outside."""
    r_x, r_y = (r.detach().bfloat16() for r in projections(32, 256))
    torch.manual_seed(2)
    outside = csimclr_loss(r_x.float(), r_y.float(), kappa_e=16384.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(2)
        inside = csimclr_loss(r_x, r_y, kappa_e=16384.0)
        byol = byol_loss(r_x, r_y)
    assert inside.loss.dtype == byol.loss.dtype == torch.float32
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_float32_losses_are_close_to_float64() -> None:
    r_x, r_y = projections(64, 256)
    z_x, z_y = (
        VonMisesFisher(F.normalize(r, dim=-1), 16384.0).sample()
        for r in (r_x.detach(), r_y.detach())
    )
    wide = csimclr_loss(r_x, r_y, kappa_e=16384.0, z_x=z_x, z_y=z_y)
    narrow = csimclr_loss(
        *(r.detach().float() for r in (r_x, r_y)),
        kappa_e=16384.0,
        z_x=z_x.float(),
        z_y=z_y.float(),
    )
    # 1e-6 of a loss near 1000; the dot-product form would be off by 1e-3 per image
    torch.testing.assert_close(narrow.loss.double(), wide.loss, rtol=3e-7, atol=0)
    torch.testing.assert_close(narrow.residual_x.double(), wide.residual_x, rtol=0, atol=5e-4)


def test_mixed_precision_is_promoted() -> None:
    r_x, r_y = projections(4, 8)
    z_x, z_y = unit_vectors(2, 4, 8)
    wide = csimclr_loss(r_x, r_y, z_x=z_x, z_y=z_y).loss
    mixed = csimclr_loss(r_x.float(), r_y, z_x=z_x.float(), z_y=z_y).loss
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, wide, rtol=1e-5, atol=1e-3)


def test_analytic_residual_keeps_small_differences_in_float32() -> None:
    """n = 2048, kappa 10 and 11 at equal means: 2.44e-4 nats between numbers near 5000."""
    r = unit_vectors(3, 2048, dtype=torch.float32)
    out = csimclr_loss(r, r, kappa_e=10.0, kappa_b=11.0, residual_estimator="analytic")
    exact = csimclr_loss(
        r.double(), r.double(), kappa_e=10.0, kappa_b=11.0, residual_estimator="analytic"
    )
    torch.testing.assert_close(out.residual_x.double(), exact.residual_x, rtol=1e-4, atol=0)
    assert exact.residual_x[0].item() == pytest.approx(2.44e-4, rel=2e-3)


# Invalid input


BAD = [
    (lambda a: simclr_loss(a[0], a), r"^r_x .* \(8,\)$"),
    (lambda a: simclr_loss(a[:0], a[:0]), r"^r_x .* \(0, 8\)$"),
    (lambda a: simclr_loss(a[:, :1], a[:, :1]), r"^r_x .* \(4, 1\)$"),
    (lambda a: simclr_loss(a, a[:3]), r"^r_y .* \(3, 8\)$"),
    (lambda a: simclr_loss(a, a.long()), r"^r_y .* torch\.int64$"),
    (lambda a: simclr_loss(a, a.numpy()), r"^r_y .* ndarray$"),
    (lambda a: simclr_loss(a, a.to("meta")), r"^r_y .* meta$"),
    (
        lambda a: simclr_loss(a, a * math.nan),
        r"^r_y .* length nan in row 0$",
    ),
    (
        lambda a: simclr_loss(a, a * 0),
        r"^r_y .* length 0 in row 0$",
    ),
    (lambda a: simclr_loss(a * 1e-20, a), r"^r_x .* length 2\.8.*e-20 in row 0$"),
    (lambda a: simclr_loss(a * 1e20, a), r"^r_x .*finite"),
    (lambda a: simclr_loss(a, a, temperature=0), r"^temperature .* 0$"),
    (lambda a: csimclr_loss(a, a, kappa_e=-1.0), r"^kappa_e .* -1\.0$"),
    (lambda a: csimclr_loss(a, a, kappa_b=math.nan), r"^kappa_b .* nan$"),
    (lambda a: csimclr_loss(a, a, beta=-0.1), r"^beta .* -0\.1$"),
    (
        lambda a: csimclr_loss(a, a, residual_estimator="exact"),  # pyright: ignore
        r"^residual_estimator .* 'exact'",
    ),
    (lambda a: csimclr_loss(a, a, z_x=a), r"^z_x .* length 2\.8"),
    (lambda a: csimclr_loss(a, a, z_y=a[:2]), r"^z_y .*r_y, \(4, 8\)"),
    (lambda a: byol_loss(a, a, weight=-1.0), r"^weight .* -1\.0$"),
    (lambda a: byol_loss(a, a[:, :4]), r"^target .*prediction, \(4, 8\)"),
    (
        lambda a: cbyol_loss(a, a, a[:2], a[:2], z=a),
        r"^y_hat .* 2$",
    ),
    (lambda a: cbyol_loss(a, a, a, a, z=2 * a), r"^z .*unit vectors"),
    (lambda a: info_nce(a, a[:2], 1.0), r"^mu .* \(2, 8\)$"),
    (lambda a: info_nce(a, a, 1.0, own=a[:2]), r"^own .*shape of z"),
    (lambda a: compress(a[:, 0], a[:3, 0], 1.0), r"nll and residual .* shapes \(4,\) and \(3,\)"),
    (lambda a: compress(a, a, 1.0), r"nll and residual .* shapes \(4, 8\)"),
    (lambda a: compress(a[:, 0], a[:, 0], -1.0), r"^beta .* -1\.0$"),
    (
        lambda a: compress(a[:, 0], a[:, 0], a[:, :1]),
        r"^beta .* \(4, 1\)$",
    ),
    (lambda a: csimclr_loss(a, a, beta=a[:, 0]), r"^beta .* \(4,\)$"),
    (
        lambda a: csimclr_loss(a, a, adaptive_weight="all"),  # pyright: ignore
        r"^adaptive_weight .* 'all'",
    ),
    (lambda a: csimclr_loss(a, a, kappa_e=torch.tensor(5.0)), r"^kappa_e .*number"),  # pyright: ignore
    (lambda a: info_nce(a, a, torch.tensor(5.0)), r"^kappa .* a tensor"),  # pyright: ignore
    (lambda a: cbyol_loss(a, a, a.to("meta"), a.to("meta"), z=a), r"^y_hat .*device"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_invalid_arguments_are_rejected(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(4, 8))
