"""Adaptive beta per image: the formula, its limits, and the claims of docs/compression.md.

All checks use autograd in float64. Tolerances of 1e-10 and less are rounding.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import unit_vectors
from torch import Tensor
from torch.distributions import kl_divergence

from compressive import VonMisesFisher, objectives
from compressive.distributions import special
from compressive.methods.dcl import dcl_loss
from compressive.objectives import (
    ADAPTIVE_WEIGHTS,
    AdaptiveWeight,
    ResidualEstimator,
    byol_loss,
    cbyol_loss,
    compress,
    csimclr_loss,
    image_beta,
    simclr_loss,
)

BATCH, DIM, KAPPA_E, KAPPA_B = 6, 8, 30.0, 4.0
KAPPAS: dict[str, Any] = {"kappa_e": KAPPA_E, "kappa_b": KAPPA_B}


def projections(seed: int = 0) -> list[Tensor]:
    x, y = unit_vectors(2, BATCH, DIM, seed=seed)
    return [(2 * x).requires_grad_(), (3 * (y + 0.7 * x)).requires_grad_()]


def directions(*rows: Tensor) -> list[Tensor]:
    return [F.normalize(each, dim=-1) for each in rows]


def assert_same_gradients(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    found = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


# The formula


def weight_by_hand(nll: Tensor, kind: AdaptiveWeight) -> Tensor:
    values = nll.tolist()
    if kind == "likelihood":
        found = [math.exp(-value) for value in values]
    else:
        found = [sum(other >= value for other in values) / len(values) for value in values]
    return torch.tensor(found, dtype=torch.float64)


def residual_by_hand(z: Tensor, mu_e: Tensor, mu_b: Tensor, rate: ResidualEstimator) -> Tensor:
    e, b = VonMisesFisher(mu_e, KAPPA_E), VonMisesFisher(mu_b, KAPPA_B)
    return kl_divergence(e, b) if rate == "analytic" else e.log_prob(z) - b.log_prob(z)


@pytest.mark.parametrize("kind", ADAPTIVE_WEIGHTS)
@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_adaptive_csimclr_matches_the_formula(
    rate: ResidualEstimator, kind: AdaptiveWeight
) -> None:
    """Mean over images of nll + beta p residual with constant p, summed over both directions."""
    r = projections()
    mu_x, mu_y = directions(*r)
    z_x, z_y = directions(mu_x + 0.1 * mu_y.detach(), mu_y + 0.1 * unit_vectors(BATCH, DIM))
    ours = csimclr_loss(
        *r, **KAPPAS, beta=0.7, z_x=z_x, z_y=z_y, residual_estimator=rate, adaptive_weight=kind
    )
    total = torch.zeros((), dtype=torch.float64)
    for z, own, other, beta in ((z_x, mu_x, mu_y, ours.beta_x), (z_y, mu_y, mu_x, ours.beta_y)):
        scores = KAPPA_B * torch.cat([z @ other.T, (z @ own.T).fill_diagonal_(-math.inf)], dim=1)
        nll = torch.logsumexp(scores, 1) - scores.diagonal()
        p = weight_by_hand(nll, kind)
        assert isinstance(beta, Tensor)
        torch.testing.assert_close(beta, 0.7 * p, rtol=1e-12, atol=0)
        assert not beta.requires_grad
        total = total + (nll + 0.7 * p * residual_by_hand(z, own, other, rate)).mean()
    torch.testing.assert_close(ours.loss, total - 2 * ours.bound, rtol=1e-12, atol=0)
    assert_same_gradients(ours.loss, total, r)


@pytest.mark.parametrize("kind", ADAPTIVE_WEIGHTS)
@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_adaptive_cbyol_matches_the_formula(rate: ResidualEstimator, kind: AdaptiveWeight) -> None:
    """The decoder's nll is 0 where prediction and target agree, so exp(-nll) is 1 there."""
    (r_e, r_b), (y_hat, y) = projections(), projections(seed=1)
    mu_e, mu_b = directions(r_e, r_b)
    (z,) = directions(mu_e + 0.1 * unit_vectors(BATCH, DIM, seed=2))
    ours = cbyol_loss(
        *(r_e, r_b, y_hat, y),
        **KAPPAS,
        z=z,
        beta=0.7,
        weight=1.5,
        residual_estimator=rate,
        adaptive_weight=kind,
    )
    nll = 1.5 * (2 - 2 * F.cosine_similarity(y_hat, y))
    p = weight_by_hand(nll, kind)
    formula = (nll + 0.7 * p * residual_by_hand(z, mu_e, mu_b, rate)).mean()
    torch.testing.assert_close(ours.loss, formula, rtol=1e-12, atol=0)
    assert_same_gradients(ours.loss, formula, [r_e, r_b, y_hat, y])
    perfect = image_beta(1.0, byol_loss(y, y).nll, "likelihood")
    assert isinstance(perfect, Tensor)
    torch.testing.assert_close(perfect, torch.ones_like(perfect), rtol=0, atol=0)


def with_weights(monkeypatch: pytest.MonkeyPatch, p: float, **how: Any) -> Any:
    """Return C-SimCLR's loss with the same p for all images."""
    monkeypatch.setattr(
        objectives, "image_beta", lambda beta, nll, _: beta * torch.full_like(nll.detach(), p)
    )
    torch.manual_seed(3)
    return csimclr_loss(**how, **KAPPAS, adaptive_weight="likelihood")


@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_weights_of_one_match_csimclr_bitwise(
    rate: ResidualEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    r_x, r_y = projections()
    how: dict[str, Any] = {"r_x": r_x, "r_y": r_y, "beta": 0.7, "residual_estimator": rate}
    torch.manual_seed(3)
    constant = csimclr_loss(**how, **KAPPAS)
    assert constant.beta_x == constant.beta_y == 0.7
    adaptive = with_weights(monkeypatch, 1.0, **how)
    grads = [torch.autograd.grad(each.loss, (r_x, r_y)) for each in (constant, adaptive)]
    assert torch.equal(constant.loss, adaptive.loss)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_weights_of_zero_are_simclr(
    rate: ResidualEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z is at its mode."""
    r_x, r_y = projections()
    z_x, z_y = directions(r_x, r_y)
    how: dict[str, Any] = {"r_x": r_x, "r_y": r_y, "z_x": z_x, "z_y": z_y}
    free = with_weights(monkeypatch, 0.0, **how, residual_estimator=rate)
    simclr = simclr_loss(r_x, r_y, temperature=1 / KAPPA_B)
    assert_same_gradients(free.loss, simclr.loss, [r_x, r_y])


def test_rank_weights_match_known_values() -> None:
    """Equal images have equal weights, those of the largest count."""
    nll = torch.tensor([3.0, 0.5, 2.0, 2.0, 9.0], requires_grad=True)
    found = image_beta(2.0, nll, "rank")
    torch.testing.assert_close(found, 2 * torch.tensor([0.4, 1.0, 0.8, 0.8, 0.2]))
    torch.testing.assert_close(image_beta(1.0, torch.zeros(3), "rank"), torch.ones(3))


def test_no_weight_returns_beta_itself() -> None:
    beta = torch.tensor(0.3)
    assert image_beta(beta, torch.rand(4), None) is beta


# Claims of docs/compression.md, in one direction, with z at its mode


def terms(beta: float, kappa_e: float = KAPPA_E) -> tuple[Tensor, Tensor, float]:
    """Return similarities, the loss as a function of them per image, and A(kappa_e)."""
    x, y = directions(*projections())
    similarity = (x @ y.T).detach().requires_grad_()
    a = float(special.constants(kappa_e, DIM).mean_resultant_length)
    return similarity, adaptive_loss(similarity, beta, a), a


def adaptive_loss(similarity: Tensor, beta: float, a: float) -> Tensor:
    nll = nll_of(similarity)
    residual = 185 - KAPPA_B * a * similarity.diagonal()  # the floor, and what beta can change
    return compress(nll, residual, image_beta(beta, nll, "likelihood"))


def nll_of(similarity: Tensor) -> Tensor:
    labels = torch.arange(len(similarity))
    return F.cross_entropy(KAPPA_B * similarity, labels, reduction="none")


def gradient(loss: Tensor, similarity: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), similarity)[0]


def without_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


def test_terms_match_csimclr() -> None:
    """By the chain rule, claims about similarities then hold for the library's loss."""
    r = projections()
    x, y = directions(*r)
    ours = csimclr_loss(
        *r,
        **KAPPAS,
        z_x=x,
        z_y=y,
        own_view_negatives=False,
        residual_estimator="analytic",
        adaptive_weight="likelihood",
    )
    a = float(special.constants(KAPPA_E, DIM).mean_resultant_length)
    both = adaptive_loss(x @ y.T, 1.0, a) + adaptive_loss(y @ x.T, 1.0, a)
    assert_same_gradients(ours.loss, both.mean(), r)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 3.0])
def test_gradients_of_positive_and_negative_similarities(beta: float) -> None:
    """They are kappa_b (1 - p) + beta p kappa_b A, and kappa_b times a negative's probability."""
    similarity, loss, a = terms(beta)
    found = gradient(loss, similarity)
    shares = (KAPPA_B * similarity).softmax(1)
    p = shares.diagonal()
    pull = KAPPA_B * (1 - p) + beta * p * KAPPA_B * a
    torch.testing.assert_close(-found.diagonal(), pull)
    torch.testing.assert_close(without_diagonal(found), without_diagonal(KAPPA_B * shares))


def test_positive_gradient_is_constant_at_beta_one_and_large_kappa_e() -> None:
    """A is 1 - 3.5e-9 at kappa_e = 1e9 in 8 dimensions; SimCLR's gradient varies over images."""
    similarity, loss, a = terms(1.0, kappa_e=1e9)
    pull = -gradient(loss, similarity).diagonal()
    assert a == pytest.approx(1, abs=1e-8)
    torch.testing.assert_close(pull, torch.full_like(pull, KAPPA_B), rtol=1e-8, atol=0)
    fading = -gradient(nll_of(similarity), similarity).diagonal()
    assert fading.min() < 0.8 * fading.max()


def test_dcl_has_the_same_positive_and_larger_negative_gradients() -> None:
    """DCL's negative gradient is the adaptive one over 1 - p: kappa_b in total, not less."""
    similarity, loss, _ = terms(1.0, kappa_e=1e9)
    scores = KAPPA_B * similarity
    negatives = scores.masked_fill(torch.eye(BATCH, dtype=torch.bool), -math.inf)
    dcl = torch.logsumexp(negatives, 1) - scores.diagonal()
    ours, theirs = gradient(loss, similarity), gradient(dcl, similarity)
    torch.testing.assert_close(ours.diagonal(), theirs.diagonal(), rtol=1e-8, atol=0)
    p = torch.exp(-nll_of(similarity.detach()))
    rest = (1 - p).unsqueeze(1)
    torch.testing.assert_close(without_diagonal(ours), without_diagonal(rest * theirs))
    total = theirs.sum(1) - theirs.diagonal()
    torch.testing.assert_close(total, torch.full_like(total, KAPPA_B))


def test_dcl_is_simclr_over_one_minus_p() -> None:
    """Image by image in the library's losses, positive and negative gradients scale alike."""
    r = projections()
    simclr, dcl = (loss(*r, temperature=1 / KAPPA_B).nll_x for loss in (simclr_loss, dcl_loss))
    for i in range(BATCH):
        assert_same_gradients(dcl[i], simclr[i] / (1 - torch.exp(-simclr[i].detach())), r)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_adaptive_field_is_not_a_gradient(beta: float) -> None:
    """Its Jacobian is not symmetric: entries differ by beta A kappa_b^2 p q."""
    similarity, _, a = terms(beta)
    shares, step = (KAPPA_B * similarity[0]).softmax(0), 1e-5

    def field(change: Tensor) -> Tensor:
        at = similarity.detach().clone()
        at[0] += change
        at.requires_grad_()
        return gradient(adaptive_loss(at, beta, a), at)[0]

    steps = step * torch.eye(BATCH, dtype=torch.float64)
    columns = [(field(each) - field(-each)) / (2 * step) for each in steps]
    jacobian = torch.stack(columns, dim=1)  # of entry i with respect to similarity j
    gap = jacobian[0, 1:] - jacobian[1:, 0]
    expected = beta * a * KAPPA_B**2 * shares[0] * shares[1:]
    torch.testing.assert_close(gap, expected, rtol=1e-6, atol=1e-8)


def test_floor_has_no_gradient_because_p_is_detached() -> None:
    similarity, loss, a = terms(1.0)
    nll = nll_of(similarity)
    residual = -KAPPA_B * a * similarity.diagonal()
    lower = compress(nll, residual, image_beta(1.0, nll, "likelihood"))
    exact = gradient(lower, similarity)
    torch.testing.assert_close(gradient(loss, similarity), exact)
    p = torch.exp(-nll_of(similarity))
    followed = gradient(nll_of(similarity) + p * (185 + residual.detach()), similarity)
    assert followed.diagonal().min() > 0, "with an attached p, pairs would repel"
