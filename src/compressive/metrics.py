"""Metrics of predictions and representations: pure functions from tensors to 0-dim tensors.

All compute in float32 or wider, also under autocast; float64 stays float64. Shapes are always
checked. Values are checked on the CPU only, because the host would wait for a GPU. On a GPU NaN
stays NaN (accuracies count it as wrong), and a label out of range is a device assertion.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from compressive.checks import validates_inputs
from compressive.platforms.float64 import to_float64

__all__ = ["Interval", "alignment", "bootstrap_interval", "brier", "confidence_bin", "ece"]
__all__ += ["effective_rank", "hits", "mean_per_class_accuracy", "nll", "top_k_accuracy"]
__all__ += ["uniformity"]

Logits = Float[Tensor, "batch classes"]
Labels = Int[Tensor, " batch"]
Scalar = Float[Tensor, ""]

_MAX_ENTRIES = 2**23  # entries of a block of a large matrix: 64 MiB of float64
_KEPT_ENTRIES = 2**26  # of resampled counts: 64 MiB


class Interval(NamedTuple):
    """Ends of a confidence interval, in the unit of the values."""

    low: Scalar
    high: Scalar


@validates_inputs
def top_k_accuracy(logits: Logits, labels: Labels, k: int = 1) -> Scalar:
    """Return the fraction of examples whose label is among the k highest logits, in [0, 1]."""
    # Ties go to the lower class, as in argmax, so that a constant predictor is not always correct.
    logits, labels = _check_logits(logits, labels)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to the number of classes, {logits.shape[1]}, got {k}")
    return hits(logits, labels, k).to(logits.dtype).mean()


def hits(logits: Logits, labels: Labels, k: int = 1) -> Bool[Tensor, " batch"]:
    """Return whether each label is among the k highest logits; ties go to the lower class."""
    label = labels[:, None]
    score = logits.gather(1, label)
    tied_before = (logits == score) & (torch.arange(logits.shape[1], device=logits.device) < label)
    # "Not <=" is ">", except that it ranks NaN above every label, so NaN counts as wrong.
    return (~(logits <= score) | tied_before).sum(1) < k


@validates_inputs
def mean_per_class_accuracy(logits: Logits, labels: Labels) -> Scalar:
    """Return the mean recall over the classes that occur: top-1 accuracy with equal weights."""
    logits, labels = _check_logits(logits, labels)
    zeros = labels.new_zeros(logits.shape[1])
    examples = zeros.index_add(0, labels, torch.ones_like(labels))
    found = zeros.index_add(0, labels, hits(logits, labels).long())
    recall = found.to(logits.dtype) / examples.clamp(min=1)
    return recall.sum() / (examples > 0).sum()


@validates_inputs
def nll(logits: Logits, labels: Labels) -> Scalar:
    """Return the mean negative log-likelihood in nats; log(classes) for uniform predictions."""
    logits, labels = _check_logits(logits, labels)
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


@validates_inputs
def brier(logits: Logits, labels: Labels) -> Scalar:
    """Return the squared distance of probabilities to the one-hot label (Brier 1950), in [0, 2]."""
    # Sum over classes, mean over examples, not halved. Papers print it times 100.
    logits, labels = _check_logits(logits, labels)
    target = torch.zeros_like(logits).scatter(1, labels[:, None], 1.0)
    return (logits.softmax(1) - target).square().sum(1).mean()


@validates_inputs
def ece(logits: Logits, labels: Labels, bins: int = 15) -> Scalar:
    """Return the expected calibration error, the binned gap of confidence and accuracy, in [0, 1].

    Bins of the highest probability have equal width (Guo et al. 2017). They are closed below, and a
    confidence of exactly 1 has its own bin, as in torchmetrics; Guo's are closed above. The results
    differ when a softmax saturates: float32 rounds 1 - 2e-8 to 1. The error is biased upward for
    few examples.
    """
    logits, labels = _check_logits(logits, labels)
    if bins < 1:
        raise ValueError(f"bins must be 1 or more, got {bins}")
    confidence, guess = logits.softmax(1).max(1)
    index = confidence_bin(confidence, bins)
    # n_b/n |acc_b - conf_b| is |sum of the gaps in b| / n. Use float64: index_add accumulates
    # one by one.
    gap = to_float64(guess == labels) - to_float64(confidence)
    binned = gap.new_zeros(bins + 1).index_add(0, index.to(gap.device), gap)
    return _as_input(binned.abs().sum() / len(labels), logits)


def confidence_bin(confidence: Float[Tensor, " batch"], bins: int = 15) -> Int[Tensor, " batch"]:
    """Return the bin of each confidence, 0 to `bins`; the last one is for exactly 1."""
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    return torch.bucketize(confidence, edges, right=True) - 1


@validates_inputs
def effective_rank(features: Float[Tensor, "batch feat"], *, center: bool = False) -> Scalar:
    """Return exp of the entropy of the singular values: how many directions the features use.

    It is between 1 and min(batch, feat), and 0 if all features are zero. Singular values are
    normalized to sum 1 (Roy & Vetterli 2007). Without centering it is RankMe (Garrido et al. 2023,
    on 25,600 images) without the 1e-7 that RankMe adds to each normalized value, which changes the
    result by at most 0.4 % for 2048 features.

    Singular values below sqrt(2e-16 min(batch, feat)) of the largest count as 0. The float64 Gram
    matrix cannot resolve them. The limit is 7e-7 for 2048 features, where float32 has only noise.
    """
    matrix = _check_rows("features", features)
    if center:
        matrix = matrix - matrix.mean(0)
    tall = matrix if matrix.shape[0] > matrix.shape[1] else matrix.T
    squares = torch.linalg.eigvalsh(tall.T @ tall)
    noise = torch.finfo(squares.dtype).eps * len(squares) * squares[-1]
    singular = torch.where(squares > noise, squares, 0.0).sqrt()
    total = singular.sum()
    entropy = torch.special.entr(singular / total).sum()
    return _as_input(torch.where(total == 0, 0.0, entropy.exp()), features)


@validates_inputs
def alignment(
    x: Float[Tensor, "batch dim"], y: Float[Tensor, "batch dim"], alpha: float = 2.0
) -> Scalar:
    """Return the mean of |x - y|**alpha on the sphere (Wang & Isola 2020), in [0, 2**alpha].

    Rows are l2-normalized here. At alpha = 2 independent views give about 2.
    """
    if x.shape != y.shape:
        raise ValueError(f"y must have the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}")
    if x.device != y.device:
        raise ValueError(f"y must be on the device of x, {x.device}, got {y.device}")
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    distance = torch.linalg.vector_norm(_unit("x", x) - _unit("y", y), dim=1)
    return distance.pow(alpha).mean().to(torch.promote_types(_wide(x), y.dtype)).to(x.device)


@validates_inputs
def uniformity(x: Float[Tensor, "batch dim"], t: float = 2.0) -> Scalar:
    """Return the log mean Gaussian potential of all pairs on the sphere (Wang & Isola 2020).

    Rows are l2-normalized here. It is 0 if all are equal, and about -2t if they are uniform in many
    dimensions. The result is exact over the pairs i < j. Time is quadratic; memory is not, unless
    autograd records.
    """
    if t <= 0:
        raise ValueError(f"t must be positive, got {t}")
    unit = _unit("x", x, least=2)  # float64, which autocast and TF32 leave unchanged
    n = len(unit)
    rows = max(1, _MAX_ENTRIES // n)
    blocks = []
    for start in range(0, n - 1, rows):
        potential = 2 * t * (unit[start : start + rows] @ unit[start:].T - 1)
        not_later = torch.ones_like(potential, dtype=torch.bool).tril()
        blocks.append(potential.masked_fill(not_later, -torch.inf).logsumexp((0, 1)))
    return _as_input(torch.stack(blocks).logsumexp(0) - math.log(n * (n - 1) / 2), x)


@validates_inputs
def bootstrap_interval(
    per_example: Float[Tensor, " batch"] | Bool[Tensor, " batch"],
    *,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of a mean (Efron 1979).

    It covers the choice of test images, not that of the training run. The same seed gives the same
    interval on the same kind of device. The interval is too narrow below about 30 examples.
    """
    n = per_example.numel()
    if per_example.ndim != 1 or n == 0:
        shape = tuple(per_example.shape)
        raise ValueError(f"per_example must be (batch,) with 1 value or more, got {shape}")
    if not 0 < level < 1:
        raise ValueError(f"level must be above 0 and below 1, got {level}")
    if draws < 1:
        raise ValueError(f"draws must be 1 or more, got {draws}")
    values = to_float64(per_example)
    _require_finite("per_example", values)
    drawn = draws, n, seed, values.device
    counts = _kept_counts(*drawn) if draws * n <= _KEPT_ENTRIES else _resampled_counts(*drawn)
    means = [(block * values).sum(1) / n for block in counts]
    tail, sample = (1 - level) / 2, torch.cat(means).to(_wide(per_example))
    return Interval(*(_as_input(sample.quantile(q), per_example) for q in (tail, 1 - tail)))


def _resampled_counts(
    draws: int, n: int, seed: int, device: torch.device
) -> Iterator[UInt8[Tensor, "rows n"]]:
    """Yield how often each of n values is drawn in each resample, in blocks of resamples."""
    random = torch.Generator(device).manual_seed(seed)
    rows = max(1, _MAX_ENTRIES // n)
    for start in range(0, draws, rows):
        size = (min(rows, draws - start), n)
        chosen = torch.randint(n, size, generator=random, device=device)
        one = torch.ones((), dtype=torch.uint8, device=device)
        yield torch.zeros(size, dtype=torch.uint8, device=device).scatter_add_(
            1, chosen, one.expand(size)
        )


@functools.lru_cache(maxsize=4)
def _kept_counts(*drawn: Any) -> tuple[UInt8[Tensor, "rows n"], ...]:
    """Keep the counts of recent calls: an evaluation has dozens of metrics of the same images."""
    return tuple(_resampled_counts(*drawn))


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _as_input(exact: Tensor, like: Tensor) -> Tensor:
    """Return a float64 result in the dtype and on the device of the input."""
    return exact.to(_wide(like)).to(like.device)


def _check_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(
            f"logits must be (batch, classes) and not empty, got {tuple(logits.shape)}"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
    if labels.device != logits.device:
        raise ValueError(f"labels must be on {logits.device} like logits, got {labels.device}")
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels must be ({len(logits)},) like logits, got {tuple(labels.shape)}")
    if logits.device.type == "cpu":
        for label in (labels.min().item(), labels.max().item()):
            if not 0 <= label < logits.shape[1]:
                raise ValueError(f"labels must be from 0 to {logits.shape[1] - 1}, got {label}")
        # -inf excludes a class, so only the highest logit of a row must be finite.
        _require_finite("the row maximum of logits", logits.amax(1))
    return logits.to(_wide(logits)), labels.long()


def _check_rows(name: str, values: Tensor, least: int = 1) -> Tensor:
    if values.ndim != 2 or len(values) < least or values.shape[1] == 0:
        shape = tuple(values.shape)
        raise ValueError(f"{name} must be (batch, dim) with {least} row(s) or more, got {shape}")
    _require_finite(name, values)
    return to_float64(values)


def _unit(name: str, values: Tensor, least: int = 1) -> Tensor:
    rows = _check_rows(name, values, least)
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if norm.device.type == "cpu" and not norm.all():
        row = int(norm.argmin())
        raise ValueError(f"{name} must have a direction in every row, got zeros in row {row}")
    return rows / norm


def _require_finite(name: str, values: Tensor) -> None:
    if values.device.type == "cpu" and not (finite := values.isfinite()).all():
        raise ValueError(f"{name} must be finite, got {values[~finite][0].item()}")
