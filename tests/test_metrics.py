"""Metrics against scikit-learn, torchmetrics, naive loops and known cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, log_loss, top_k_accuracy_score
from torch import Tensor

from compressive import metrics
from compressive.metrics import (
    alignment,
    bootstrap_interval,
    brier,
    ece,
    effective_rank,
    mean_per_class_accuracy,
    nll,
    top_k_accuracy,
    uniformity,
)

EXACT = {"rtol": 0, "atol": 1e-12}  # float64: a few thousand roundings of 1e-16
SINGLE = {"rtol": 1e-6, "atol": 1e-6}  # float32, with a spacing of 1.2e-7, on values of order 1

ON_LOGITS = [top_k_accuracy, mean_per_class_accuracy, nll, brier, ece]
ON_FEATURES = [effective_rank, uniformity, lambda x: alignment(x, x.flip(0))]


def close(actual: Tensor, expected: float | Tensor, *, rtol: float, atol: float) -> None:
    assert actual.ndim == 0
    assert actual.item() == pytest.approx(float(expected), rel=rtol, abs=atol)


def predictions(
    n: int = 400, classes: int = 7, scale: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return float64 logits that are right half of the time, and uneven labels without class 2."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.arange(1.0, classes + 1)
    weights[2] = 0
    labels = weights.multinomial(n, replacement=True, generator=rng)
    logits = torch.randn(n, classes, generator=rng, dtype=torch.float64)
    return scale * (logits + torch.nn.functional.one_hot(labels, classes)), labels


def features(n: int = 60, dim: int = 9, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=rng, dtype=torch.float64) + 0.5


# Predictions


@pytest.mark.parametrize("k", [1, 2, 6])
def test_top_k_accuracy_matches_sklearn_without_ties(k: int) -> None:
    logits, labels = predictions()
    expected = top_k_accuracy_score(labels, logits, k=k, labels=range(7))
    close(top_k_accuracy(logits, labels, k), float(expected), **EXACT)


def test_hits_are_per_image_and_nan_is_a_miss() -> None:
    """`scores`, kNN and the corruptions count them in the same way."""
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0], [3.0, float("nan"), 0.0]])
    labels = torch.tensor([1, 1, 0])
    assert metrics.hits(logits, labels).tolist() == [False, True, False]
    assert metrics.hits(logits, labels, 2).tolist() == [True, True, True]


def test_constant_logits_predict_the_first_classes() -> None:
    logits, labels = torch.zeros(8, 4), torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    got = [top_k_accuracy(logits, labels, k).item() for k in (1, 2, 3, 4)]
    assert got == [3 / 8, 5 / 8, 6 / 8, 1]  # eighths are exact in binary
    assert mean_per_class_accuracy(logits, labels) == 1 / 4


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=9))
@settings(deadline=None)
def test_ties_are_ranked_by_a_stable_sort(rows: list[list[int]]) -> None:
    """The top k are the first k of a stable descending sort, so the first is argmax."""
    logits = torch.tensor(rows, dtype=torch.float32)
    labels = torch.arange(len(rows)) % 4
    order = logits.sort(dim=1, descending=True, stable=True).indices
    for k in (1, 2, 3, 4):
        expected = (order[:, :k] == labels[:, None]).any(1).double().mean().item()
        close(top_k_accuracy(logits, labels, k), expected, **SINGLE)
    hits = (logits.argmax(1) == labels).double().mean().item()
    close(top_k_accuracy(logits, labels), hits, **SINGLE)


def test_mean_per_class_accuracy_matches_sklearn() -> None:
    logits, labels = predictions()
    guesses = logits.argmax(1)
    guesses[labels == 2] = 0
    kept = guesses != 2  # sklearn warns of a prediction that is never a label
    expected = balanced_accuracy_score(labels[kept], guesses[kept])
    close(mean_per_class_accuracy(logits[kept], labels[kept]), float(expected), **EXACT)


@pytest.mark.parametrize("scale", [0.1, 2.0, 4.0])  # beyond, sklearn clips at 2e-16
def test_nll_matches_sklearn(scale: float) -> None:
    logits, labels = predictions(scale=scale)
    expected = log_loss(labels, logits.softmax(1), labels=range(7))
    close(nll(logits, labels), float(expected), rtol=1e-10, atol=0)  # sklearn renormalizes


@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
def test_brier_matches_a_double_loop(scale: float) -> None:
    logits, labels = predictions(n=50, scale=scale)
    p = logits.softmax(1).tolist()
    expected = sum(
        (p[i][c] - (1.0 if c == labels[i] else 0.0)) ** 2 for i in range(50) for c in range(7)
    )
    close(brier(logits, labels), expected / 50, **EXACT)


def test_known_predictions_have_known_scores() -> None:
    labels = torch.arange(6) % 5
    perfect = 100.0 * torch.nn.functional.one_hot(labels, 5)
    wrong = 100.0 * torch.nn.functional.one_hot((labels + 1) % 5, 5)
    uniform = torch.zeros(6, 5)
    for score, scores in {
        nll: (0, 100, math.log(5)),
        brier: (0, 2, 4 / 5),  # (1 - 1/5)^2 + 4 / 5^2
        ece: (0, 1, 2 / 6 - 1 / 5),  # class 0 is predicted and is right for two of the six
        mean_per_class_accuracy: (1, 0, 1 / 5),
        top_k_accuracy: (1, 0, 2 / 6),
    }.items():
        for logits, expected in zip((perfect, wrong, uniform), scores, strict=True):
            close(score(logits, labels), expected, **SINGLE)


@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 3, 10]),
    st.sampled_from([1, 2, 10, 15]),
    st.sampled_from([0.0, 0.5, 3.0, 10.0, 30.0, 1e4]),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_ece_matches_torchmetrics(
    seed: int, classes: int, bins: int, scale: float, whole: bool
) -> None:
    """Cover bin edges: integer logits give confidences of exactly 1/2, and 10 or more give 1."""
    # Its import takes 3 s, so only the process that runs this test imports it.
    from torchmetrics.functional.classification import multiclass_calibration_error

    rng = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(64, classes, generator=rng)
    logits = logits.round() if whole else logits
    labels = torch.randint(classes, (64,), generator=rng)
    # torchmetrics treats logits that are all in [0, 1] as probabilities.
    expected = multiclass_calibration_error(logits.softmax(1), labels, classes, n_bins=bins)
    close(ece(logits, labels, bins), expected.item(), **SINGLE)


def test_ece_matches_guo_et_al_away_from_bin_edges() -> None:
    """Sum |B| / n * |acc(B) - conf(B)| over (m/M, (m+1)/M], eq. 3 of the paper."""
    logits, labels = predictions()
    confidence, guess = (a.numpy() for a in logits.softmax(1).max(1))
    correct = guess == labels.numpy()
    expected = 0.0
    for m in range(15):
        held = (confidence > m / 15) & (confidence <= (m + 1) / 15)
        if held.any():
            expected += held.mean() * abs(correct[held].mean() - confidence[held].mean())
    close(ece(logits, labels), expected, **EXACT)


def test_class_masked_by_minus_infinity_is_supported() -> None:
    logits, labels = predictions()
    masked = logits.clone()
    masked[:, 2] = -torch.inf  # the class without labels
    rest = torch.tensor([0, 1, 3, 4, 5, 6])
    for score in ON_LOGITS:
        close(score(masked, labels), score(logits[:, rest], labels - (labels > 2).long()), **EXACT)


# Representations


def rank_by_svd(x: Tensor, epsilon: float = 0.0, power: int = 1) -> float:
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False) ** power
    p = sigma / sigma.sum() + epsilon
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("shape", [(60, 9), (9, 60), (20, 20), (1, 5), (5, 1)])
@pytest.mark.parametrize("center", [False, True])
def test_effective_rank_matches_svd(shape: tuple[int, int], center: bool) -> None:
    x = features(*shape)
    expected = rank_by_svd(x - x.mean(0)) if center and shape[0] > 1 else rank_by_svd(x)
    if center and shape[0] == 1:
        expected = 0.0  # one centered point is zero
    close(effective_rank(x, center=center), expected, rtol=1e-9, atol=1e-9)  # see the docstring


def test_effective_rank_is_accurate_over_five_decades() -> None:
    x = features(200, 100) * torch.logspace(0, -5, 100, dtype=torch.float64)
    close(effective_rank(x), rank_by_svd(x), rtol=1e-9, atol=0)
    assert effective_rank(x) > 1.5 * rank_by_svd(x, power=2)  # that of the covariance differs


def test_known_features_have_known_ranks() -> None:
    orthonormal = torch.linalg.qr(features(50, 12)).Q
    spread = features(40, 1) @ features(1, 300, seed=1)
    # Gram matrices alone would give 1.00003 for rank 1, from 300 values of 1e-8 instead of 0.
    close(effective_rank(orthonormal), 12, **EXACT)
    close(effective_rank(orthonormal.T), 12, **EXACT)
    close(effective_rank(spread), 1, **EXACT)
    close(effective_rank(torch.zeros(8, 3)), 0, **EXACT)
    two = torch.eye(2, dtype=torch.float64).repeat_interleave(5, 0).repeat(1, 4)
    close(effective_rank(two), 2, **EXACT)


@pytest.mark.parametrize("rank", [1, 50, 200])
def test_effective_rank_matches_rankme_up_to_its_epsilon(rank: int) -> None:
    """d fractions of 1e-7 add at most d * 1e-7 * 16.1 nats: 0.03 % at 200, 0.33 % at 2048."""
    x = features(300, rank) @ features(rank, 200, seed=1)
    close(effective_rank(x), rank_by_svd(x, epsilon=1e-7), rtol=200 * 1.62e-6, atol=0)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.5])
def test_alignment_matches_a_loop(alpha: float) -> None:
    x, y = features(), features(seed=1)
    total = 0.0
    for u, v in zip(x.tolist(), y.tolist(), strict=True):
        difference = [a / math.hypot(*u) - b / math.hypot(*v) for a, b in zip(u, v, strict=True)]
        total += math.hypot(*difference) ** alpha
    close(alignment(x, y, alpha), total / len(x), **EXACT)
    close(alignment(x, 3 * x, alpha), 0, **EXACT)
    close(alignment(x, -x, alpha), 2**alpha, rtol=1e-12, atol=0)


@pytest.mark.parametrize("t", [0.5, 2.0, 5.0])
def test_uniformity_matches_a_double_loop(t: float) -> None:
    x = features()
    u = (x / x.norm(dim=1, keepdim=True)).tolist()
    pairs = [(i, j) for i in range(len(u)) for j in range(i + 1, len(u))]
    total = sum(math.exp(-t * math.dist(u[i], u[j]) ** 2) for i, j in pairs)
    close(uniformity(x, t), math.log(total / len(pairs)), **EXACT)


@pytest.mark.parametrize("entries", [1, 120, 121, 61 * 59, 61 * 60, 2**23])
def test_blocks_do_not_change_uniformity(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one row at a time, two (with a remainder), all but some, and all 61 at once."""
    u = torch.nn.functional.normalize(features(61))
    expected = torch.pdist(u).square().mul(-2).exp().mean().log().item()
    monkeypatch.setattr(metrics, "_MAX_ENTRIES", entries)
    close(uniformity(u), expected, **EXACT)


def test_uniformity_of_known_points() -> None:
    close(uniformity(torch.ones(5, 3, dtype=torch.float64)), 0, **EXACT)
    antipodes = torch.tensor([[1.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    close(uniformity(antipodes), -8, **EXACT)  # -t * 2^2
    close(uniformity(antipodes, t=1e4), -4e4, rtol=1e-12, atol=0)  # its exp underflows


# Intervals


def test_bootstrap_interval_matches_numpy() -> None:
    """Allow 0.3 standard errors of the mean: five sigmas of two runs.

    With 4000 draws, an end has a standard error of about sqrt(.025 * .975 / 4000) / .058 = .043
    standard errors of the mean (.058 is the normal density there).
    """
    values = torch.from_numpy(np.random.default_rng(0).gamma(1.0, size=200))
    ours = bootstrap_interval(values, draws=4000)
    drawn = np.random.default_rng(1).choice(values.numpy(), size=(4000, 200)).mean(1)
    theirs = np.percentile(drawn, [2.5, 97.5])
    tolerance = 0.3 * values.std().item() / math.sqrt(200)
    close(ours.low, theirs[0], rtol=0, atol=tolerance)
    close(ours.high, theirs[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_bootstrap_interval_has_nominal_coverage(level: float) -> None:
    """400 normal samples of 100: the rate has a standard error of at most 2.5 %; allow three."""
    rng = torch.Generator().manual_seed(0)
    intervals = [
        bootstrap_interval(torch.randn(100, generator=rng), level=level, draws=400, seed=trial)
        for trial in range(400)
    ]
    covered = sum(bool(low <= 0 <= high) for low, high in intervals) / 400
    assert covered == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / 400))


def test_bootstrap_is_reproducible_for_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = features(50, 1)[:, 0]
    once = bootstrap_interval(values, draws=100)
    assert bootstrap_interval(values, draws=100) == once
    assert bootstrap_interval(values, draws=100, seed=1) != once
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for entries in (1, 50 * 7):
        monkeypatch.setattr(metrics, "_MAX_ENTRIES", entries)
        metrics._kept_counts.cache_clear()
        assert bootstrap_interval(values, draws=100) == once  # same draws, summed by rows
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kept", [0, 2**26])
def test_bootstrap_equals_the_mean_of_drawn_values(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of drawn values, which other metrics of the same images share, change nothing."""
    monkeypatch.setattr(metrics, "_KEPT_ENTRIES", kept)
    for seed, values in enumerate(features(70, 3).T):
        random = torch.Generator().manual_seed(seed % 2)
        drawn = torch.randint(70, (300, 70), generator=random)
        means = values[drawn].mean(1)
        found = bootstrap_interval(values, draws=300, seed=seed % 2)
        close(found.low, means.quantile(0.025), **EXACT)
        close(found.high, means.quantile(0.975), **EXACT)


def test_bootstrap_of_hits_matches_binomial_quantiles() -> None:
    low, high = bootstrap_interval(torch.tensor([True] * 80 + [False] * 20))
    # Binomial quantiles of n = 100, p = 0.8 are 0.72 and 0.87; sampling may move them by one count.
    close(low, 0.72, rtol=0, atol=0.0101)
    close(high, 0.87, rtol=0, atol=0.0101)
    low, high = bootstrap_interval(torch.ones(5))
    assert low == high == 1


# Precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    """The same numbers in float64 give the same scores, so only the input is rounded."""
    logits, labels = predictions()
    logits, x = logits.to(dtype), features().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for score in ON_LOGITS:
            close(actual := score(logits, labels), score(logits.double(), labels), **SINGLE)
            assert actual.dtype == torch.float32
        for score in ON_FEATURES:
            close(actual := score(x), score(x.double()), **SINGLE)
            assert actual.dtype == torch.float32
        interval = bootstrap_interval(x[:, 0])
        assert interval.low.dtype == torch.float32
        close(interval.high, bootstrap_interval(x[:, 0].double()).high, **SINGLE)


def test_float64_stays_float64() -> None:
    logits, labels = predictions()
    scores = [score(logits, labels) for score in ON_LOGITS]
    scores += [score(features()) for score in ON_FEATURES]
    scores += bootstrap_interval(features()[:, 0])
    assert {score.dtype for score in scores} == {torch.float64}
    far = bootstrap_interval(features()[:, 0] + 1e6)  # spacing is 1e-10 there, 0.06 in float32
    close(far.low - 1e6, bootstrap_interval(features()[:, 0]).low, rtol=0, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_scores_do_not_synchronize_and_nan_is_a_miss() -> None:
    logits, labels = predictions()
    x = features()
    on_gpu, there, rows = logits.cuda(), labels.cuda(), x.cuda()
    broken = torch.full_like(on_gpu, torch.nan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            scores = [score(on_gpu, there) for score in ON_LOGITS]
            pairs = [uniformity(rows), alignment(rows, rows.flip(0))]
            misses = [top_k_accuracy(broken, there, 7), mean_per_class_accuracy(broken, there)]
            undefined = [nll(broken, there), brier(broken, there), ece(broken, there)]
            bootstrap_interval(rows[:, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for score, value in zip(ON_LOGITS, scores, strict=True):
        close(value, score(logits, labels), **EXACT)
    close(pairs[0], uniformity(x), **EXACT)
    close(pairs[1], alignment(x, x.flip(0)), **EXACT)
    close(effective_rank(rows), effective_rank(x), rtol=1e-9, atol=0)  # eigvalsh synchronizes
    assert [miss.item() for miss in misses] == [0, 0]
    assert all(score.isnan() for score in undefined)


# Errors


@pytest.mark.parametrize("score", ON_LOGITS)
def test_invalid_predictions_are_rejected(score) -> None:
    logits, labels = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    nan, infinite, ruled_out = logits.clone(), logits.clone(), logits.clone()
    nan[1, 2], infinite[1, 2], ruled_out[1] = torch.nan, torch.inf, -torch.inf
    for arguments, message in [
        ((logits[0], labels), r"^logits .* \(3,\)$"),
        ((logits[:0], labels[:0]), r"^logits .* \(0, 3\)$"),
        ((logits[:, :0], labels), r"^logits .* \(4, 0\)$"),
        ((logits, labels[:3]), r"^labels .* \(3,\)$"),
        ((logits, labels[:, None]), r"^labels .* \(4, 1\)$"),
        ((logits, labels.float()), r"^labels .* torch\.float32$"),
        ((logits, labels.to("meta")), r"^labels .* meta$"),
        ((logits, labels + 1), r"^labels .* 3$"),
        ((logits, labels - 1), r"^labels .* -1$"),
        ((nan, labels), r"logits .* nan$"),
        ((infinite, labels), r"logits .* inf$"),
        ((ruled_out, labels), r"logits .* -inf$"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(*arguments)


def test_invalid_features_are_rejected() -> None:
    x = torch.ones(4, 3)
    nan, zero = x.clone(), x.clone()
    nan[1, 2], zero[2] = torch.nan, 0
    for call, message in [
        (lambda: effective_rank(x[0]), r"^features .* \(3,\)$"),
        (lambda: effective_rank(x[:0]), r"^features .* \(0, 3\)$"),
        (lambda: effective_rank(x[:, :0]), r"^features .* \(4, 0\)$"),
        (lambda: effective_rank(nan), r"^features .* nan$"),
        (lambda: alignment(x, x[:3]), r"^y .* \(3, 3\)$"),
        (lambda: alignment(x[:0], x[:0]), r"^x .* \(0, 3\)$"),
        (lambda: alignment(x, zero), r"^y .* zeros in row 2$"),
        (lambda: alignment(x, nan), r"^y .* nan$"),
        (lambda: alignment(x, x.to("meta")), r"^y .* meta$"),
        (lambda: alignment(x, x, 0), r"^alpha .* 0$"),
        (lambda: uniformity(x[:1]), r"^x .* \(1, 3\)$"),
        (lambda: uniformity(zero), r"^x .* zeros in row 2$"),
        (lambda: uniformity(x, -1), r"^t .* -1$"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_invalid_settings_are_rejected() -> None:
    logits, labels = predictions()
    ones = torch.ones(3)
    for call, message in [
        (lambda: top_k_accuracy(logits, labels, 0), r"^k .* 0$"),
        (lambda: top_k_accuracy(logits, labels, 8), r"^k .* 8$"),
        (lambda: ece(logits, labels, 0), r"^bins .* 0$"),
        (lambda: bootstrap_interval(ones[:0]), r"^per_example .* \(0,\)$"),
        (lambda: bootstrap_interval(ones[None]), r"^per_example .* \(1, 3\)$"),
        (lambda: bootstrap_interval(ones / 0), r"^per_example .* inf$"),
        (
            lambda: bootstrap_interval(ones, level=1),
            r"^level .* 1$",
        ),
        (
            lambda: bootstrap_interval(ones, level=0.0),
            r"^level .* 0\.0$",
        ),
        (lambda: bootstrap_interval(ones, draws=0), r"^draws .* 0$"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
