"""Logistic regression reaches scikit-learn's minimum at every penalty of the grid."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from compressive.evaluation import logistic, newton
from compressive.evaluation.logistic import PENALTIES, fit, select
from compressive.metrics import top_k_accuracy

pytestmark = pytest.mark.usefixtures("one_thread")


def rectified(
    count: int, feat: int, classes: int, *, noise: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return nonnegative, correlated float64 features of very different scales, as in a network."""
    fixed = torch.Generator().manual_seed(99)
    means, mix = (torch.randn(s, generator=fixed) for s in ((classes, 12), (12, feat)))
    scale = torch.randn(feat, generator=fixed).exp()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    sources = means[labels] + noise * torch.randn(count, 12, generator=generator)
    extra = 0.3 * torch.randn(count, feat, generator=generator)
    return ((sources @ mix / 3 + extra).relu() * scale).double(), labels


def objective(feats: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, l2: float) -> float:
    """Compute the objective as written in the specification, in float64."""
    logits = feats.double() @ weight + bias
    chosen = logits.log_softmax(1)[torch.arange(len(labels)), labels]
    return float(-chosen.sum() + l2 / 2 * weight.square().sum())


def sklearn_fit(feats: Tensor, labels: Tensor, l2: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias from Newton's method with Cholesky factors, exact to rounding."""
    model = LogisticRegression(C=1 / l2, solver="newton-cholesky", tol=1e-12, max_iter=1000)
    with warnings.catch_warnings(action="ignore"):  # the last step is below rounding error
        model.fit(feats.double().numpy(), labels.numpy())
    return torch.from_numpy(model.coef_.T), torch.from_numpy(model.intercept_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("noise", "count"), [(0.5, 200), (2.0, 300)], ids=["separable", "mixed"])
def test_fit_matches_sklearn_at_every_penalty(noise: float, count: int, dtype: torch.dtype) -> None:
    """Losses agree to 1e-6, and so do all predictions on 2,000 new examples except near ties.

    The "separable" data can be classified without error, so losses at small penalties are tiny
    and weights are large. A tie is within 1e-3 of the largest logit, about 100 times the
    uncertainty that a relative loss error of 1e-6 allows.
    """
    feats, labels = rectified(count, 16, 4, noise=noise)
    feats = feats.to(dtype)
    found = fit(feats, labels, classes=4)
    assert found.converged.all()
    new = rectified(2000, 16, 4, noise=noise, seed=1)[0].to(dtype)
    for i, l2 in enumerate(PENALTIES):
        weight, bias = sklearn_fit(feats, labels, l2)
        expected = objective(feats, labels, weight, bias, l2)
        own = objective(feats, labels, found.weight[i], found.bias[i], l2)
        assert own == pytest.approx(expected, rel=1e-6), f"l2 = {l2}"
        assert found.loss[i].item() == pytest.approx(own, rel=1e-9)
        logits = new.double() @ weight + bias
        first, second = logits.topk(2, 1).values.T
        clear = first - second > 1e-3 * logits.abs().amax(1)
        same = found.logits(new, i).argmax(1) == logits.argmax(1)
        assert same[clear].all()
        assert clear.double().mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("l2", "blocks"), [(1e-2, 2**26), (1e-4, 2**26), (1e-2, 0)])
def test_weak_penalty_converges_in_few_steps(l2: float, blocks: int) -> None:
    """A quarter of the examples is noisy, with other principal axes than the whole set.

    Within-class curvature needs 135 and 298 steps; a diagonal needs 1,947 and more than 3,000.
    """
    feats, labels = separable_and_noisy()
    found = fit(feats, labels, classes=4, penalties=[l2], block_values=blocks)
    assert found.converged.all()
    assert (found.steps < 400).all() == (blocks > 0)
    expected = objective(feats, labels, *sklearn_fit(feats, labels, l2), l2)
    assert found.loss.item() == pytest.approx(expected, rel=1e-6)


def separable_and_noisy() -> tuple[Tensor, Tensor]:
    """Return distant clusters, plus noisy examples between them with signal at every scale."""
    generator = torch.Generator().manual_seed(0)
    means = 12 * F.normalize(torch.randn(4, 64, generator=generator))
    labels = torch.randint(4, (1000,), generator=generator)
    feats = means[labels] + torch.randn(1000, 64, generator=generator)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
    noisy = torch.randn(1000, 64, generator=generator) * 10 ** (-2.5 * torch.arange(64) / 64)
    noisy = noisy @ turn
    scores = noisy @ torch.randn(64, 4, generator=generator) / 4
    gumbel = -torch.log(-torch.log(torch.rand(1000, 4, generator=generator)))
    is_noisy = torch.arange(1000) % 4 == 0
    feats = torch.where(is_noisy[:, None], noisy, feats)
    return feats, torch.where(is_noisy, (scores + gumbel).argmax(1), labels)


def test_penalty_grid_matches_the_paper() -> None:
    np.testing.assert_allclose(PENALTIES, np.logspace(-6, 5, 45), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 3, 9])
def test_joint_fits_match_separate_fits(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results keep the requested order and duplicates. Losses agree within the documented 2e-7.

    The CPU fits one penalty at a time, a GPU fits three, or nine of small problems.
    """
    monkeypatch.setitem(logistic._TOGETHER, "cpu", together)
    feats, labels = rectified(150, 40, 5)
    penalties = (1e-3, 1e2, 1e-6, 1.0, 1e2, 3e-5, 10.0)
    found = fit(feats, labels, classes=5, penalties=penalties)
    assert found.penalties == penalties
    for i, l2 in enumerate(penalties):
        alone = fit(feats, labels, classes=5, penalties=[l2])
        torch.testing.assert_close(found.loss[i], alone.loss[0], rtol=2e-7, atol=0)
    torch.testing.assert_close(found.weight[1], found.weight[4], rtol=0, atol=0)


def test_weights_stay_in_the_span_of_the_examples() -> None:
    """With 60 features and 40 examples the fit matches sklearn, with no part outside the span."""
    feats, labels = rectified(40, 60, 3)
    found = fit(feats, labels, classes=3, penalties=(1e-2, 1.0))
    for i, l2 in enumerate(found.penalties):
        weight, bias = sklearn_fit(feats, labels, l2)
        expected = objective(feats, labels, weight, bias, l2)
        assert found.loss[i].item() == pytest.approx(expected, rel=1e-6)
        rows = torch.linalg.qr((feats - feats.mean(0)).T)[0]
        outside = found.weight[i] - rows @ (rows.T @ found.weight[i])
        assert outside.norm() < 1e-10 * found.weight[i].norm()


def test_fit_without_principal_axes_reaches_the_same_loss() -> None:
    """Principal axes are not computed when that takes longer than the steps it saves."""
    feats, labels = rectified(30, 100, 2)
    spaces = [logistic._Space.of(feats, False, work) for work in (10_000, 1)]
    losses = []
    for space in spaces:
        start = torch.zeros(1, space.x.shape[1], 2, dtype=torch.float64)
        l2 = torch.tensor([10.0], dtype=torch.float64)
        at = newton.minimize(space.x, labels, l2, start, steps=1000, tolerance=1e-12)
        weight = space.basis @ at.w[0, :-1]
        bias = at.w[0, -1] - space.mean @ weight
        losses.append(objective(feats, labels, weight, bias, 10.0))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    gram = spaces[0].x.T @ spaces[0].x
    assert (gram - gram.diag().diag()).abs().max() < 1e-10 * gram.max()
    plain = spaces[1].x.T @ spaces[1].x
    assert (plain - plain.diag().diag()).abs().max() > 1e-2 * plain.max()


def test_two_classes_match_sklearn_at_half_the_penalty() -> None:
    """The weights w/2 and -w/2 together have half the squared norm of w."""
    feats, labels = rectified(100, 8, 2)
    found = fit(feats, labels, classes=2, penalties=[0.2])
    weight, bias = sklearn_fit(feats, labels, 0.1)
    w, b = found.weight[0], found.bias[0]
    torch.testing.assert_close(w[:, 1] - w[:, 0], weight[:, 0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(b[1] - b[0], bias[0], rtol=1e-3, atol=1e-4)


def test_class_without_examples_is_never_predicted() -> None:
    feats, labels = rectified(120, 10, 3)
    sparse_labels = torch.tensor([1, 4, 5])[labels]
    dense = fit(feats, labels, classes=3, penalties=(1e-4, 1.0))
    gaps = fit(feats, sparse_labels, classes=7, penalties=(1e-4, 1.0))
    torch.testing.assert_close(gaps.loss, dense.loss, rtol=0, atol=0)
    chances = gaps.logits(1e4 * feats, 0).softmax(1)
    assert chances[:, [0, 2, 3, 6]].max() == 0
    assert gaps.logits(feats, 1).isfinite().all()
    torch.testing.assert_close(gaps.logits(feats, 1)[:, [1, 4, 5]], dense.logits(feats, 1))


def test_single_class_has_zero_loss() -> None:
    found = fit(torch.randn(5, 3), torch.ones(5, dtype=torch.long), classes=3)
    assert (found.loss == 0).all()
    assert found.converged.all()
    assert (found.logits(torch.randn(4, 3)).argmax(1) == 1).all()


def test_standardization_removes_scale_and_shift() -> None:
    """Weights apply to the raw features, and `standardized` records how they were penalized."""
    feats, labels = rectified(150, 6, 3)
    by_hand = (feats - feats.mean(0)) / feats.std(0, unbiased=False)
    expected = fit(by_hand, labels, classes=3, penalties=[1.0])
    scale, shift = torch.logspace(-3, 3, 6).double(), torch.arange(6) * 50.0
    moved = torch.cat([feats * scale + shift, torch.full((150, 1), 7.1)], 1)  # and a constant
    found = fit(moved, labels, classes=3, penalties=[1.0], standardize=True)
    assert (found.standardized, expected.standardized) == (True, False)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-7, atol=0)
    torch.testing.assert_close(found.logits(moved), expected.logits(by_hand), rtol=1e-3, atol=1e-3)


def test_early_stopping_is_reported() -> None:
    feats, labels = rectified(150, 20, 3)
    found = fit(feats, labels, classes=3, penalties=(1e-6, 1e5), steps=12)
    assert found.converged.tolist() == [False, True]
    assert found.steps[0] == 12
    gradient = fit(feats, labels, classes=3, penalties=(1e-6, 1e5)).gradient_norm
    assert gradient[0] < 1e-3 * found.gradient_norm[0]


@pytest.mark.slow
def test_float32_takes_no_more_steps_than_float64() -> None:
    """Computing curvature by subtracting large numbers would need ten times as many or diverge."""
    feats, labels = rectified(300, 100, 10, noise=0.5)
    feats = 100 * feats.float() + 1000
    narrow, exact = (fit(x, labels, classes=10) for x in (feats, feats.double()))
    assert narrow.converged.all()
    assert narrow.steps.sum() < 1.5 * exact.steps.sum()
    torch.testing.assert_close(narrow.loss, exact.loss, rtol=1e-6, atol=0)


def test_fit_ignores_and_preserves_precision_settings() -> None:
    """With autocast to bfloat16 the loss would be off by about 1e-3."""
    feats, labels = rectified(100, 20, 3)
    plain = fit(feats.float(), labels, classes=3, penalties=(1e-3, 1.0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = fit(feats.float(), labels, classes=3, penalties=(1e-3, 1.0))
            logits = found.logits(feats.float(), 1)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found.loss, plain.loss, rtol=0, atol=0)
    torch.testing.assert_close(logits, plain.logits(feats.float(), 1), rtol=0, atol=0)
    assert logits.dtype == torch.float64


def test_gradient_is_exact_for_confident_predictions() -> None:
    """In float32, 1 - p is 0 or a multiple of 6e-8; the residual has a relative error of 1e-6."""
    z = torch.tensor([[[0.0, 20.0, -3.0]], [[50.0, 0.0, 1.0]], [[-70.0, 0.0, 30.0]]])
    labels = torch.tensor([1, 0, 1])
    loss, residual = newton.cross_entropy(z, labels)
    for i, label in enumerate(labels.tolist()):
        exact = [math.exp(v - z[i, 0, label].item()) for v in z[i, 0].tolist()]
        total = math.fsum(exact)
        others = total - 1 if total > 2 else math.fsum(v for j, v in enumerate(exact) if j != label)
        gradient_row = [v / total for v in exact]
        gradient_row[label] = -others / total
        found = residual[i, 0].tolist()
        # Probabilities are clamped at exp(-60).
        assert found == pytest.approx(gradient_row, rel=1e-6, abs=1e-25)
    alone, _ = newton.cross_entropy(z[:1], labels[:1])
    assert alone.item() == pytest.approx(math.log1p(math.exp(-20) + math.exp(-23)), rel=1e-6)
    assert loss.item() == pytest.approx(30, rel=1e-6)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return top_k_accuracy(logits, labels)


def test_select_picks_best_validation_penalty_and_refits_on_all() -> None:
    train, held = rectified(60, 40, 4, noise=1.5), rectified(200, 40, 4, noise=1.5, seed=1)
    grid = (1e-4, 1e-2, 1.0, 1e2, 1e4)
    found = select(train, held, accuracy, classes=4, penalties=grid)
    scores = []
    for l2 in grid:
        weight, bias = sklearn_fit(*train, l2)
        predicted = (held[0] @ weight + bias).argmax(1)
        scores.append((predicted == held[1]).double().mean().item())
    assert found.scores == pytest.approx(scores)
    assert found.penalty == max(zip(scores, grid, strict=True))[1]
    both = [torch.cat(parts) for parts in zip(train, held, strict=True)]
    weight, bias = sklearn_fit(both[0], both[1], found.penalty)
    expected = objective(both[0], both[1], weight, bias, found.penalty)
    assert found.fit.penalties == (found.penalty,)
    assert found.fit.loss.item() == pytest.approx(expected, rel=1e-6)
    assert found.warning is None


def test_ties_are_broken_by_log_loss_and_grid_ends_are_reported() -> None:
    """Validating on the training data favors the weakest penalty."""
    train = rectified(60, 10, 3)

    def even(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.tensor(0.5)

    found = select(train, train, even, classes=3, penalties=(1.0, 10.0, 0.1))
    losses = [F.cross_entropy(found.sweep.logits(train[0], i), train[1]) for i in range(3)]
    assert losses[2] < losses[0] < losses[1]
    assert found.penalty == 0.1
    assert found.warning is not None
    assert "l2" in found.warning
    assert "0.1" in found.warning
    assert "low end" in found.warning
    blank = torch.zeros_like(train[0]), torch.arange(60) % 3  # all fits are equal
    assert select(blank, blank, even, classes=3, penalties=(1.0, 10.0, 0.1)).penalty == 10
    short = select(train, train, even, classes=3, penalties=(1e-6,), steps=2)
    assert short.warning is not None
    assert short.warning.startswith("2 of 2 fits")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feats": torch.zeros(3)}, r"feats .*got \(3,\)"),
        ({"feats": torch.zeros(3, 2).long()}, "feats .*floating-point"),
        ({"feats": torch.tensor([[0.0], [torch.nan], [1.0]])}, "NaN .*row 1"),
        ({"labels": torch.tensor([0, 1])}, "labels .*3 integers"),
        ({"labels": torch.tensor([0, 1, 5])}, "classes - 1 = 2, got 5"),
        ({"labels": torch.tensor([0, -1, 1])}, "classes - 1 = 2, got -1"),
        ({"penalties": ()}, "penalties .*l2"),
        ({"penalties": (1.0, 0.0)}, "penalty .*got 0"),
        ({"steps": 0}, "steps .*got 0"),
    ],
)
def test_invalid_fit_arguments_are_refused(change: dict, message: str) -> None:
    given = {"feats": torch.randn(3, 2), "labels": torch.tensor([0, 1, 2]), "classes": 3}
    with pytest.raises(ValueError, match=message):
        fit(**{**given, **change})


def test_fit_reports_progress_after_each_penalty() -> None:
    feats, labels = separable_and_noisy()
    seen: list[tuple[int, int]] = []
    fit(feats, labels, classes=4, penalties=(0.1, 1.0), progress=lambda *now: seen.append(now))
    assert seen == [(1, 2), (2, 2)]
