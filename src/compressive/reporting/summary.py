"""Summarize a run: its main metrics, and how it failed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from compressive.rundir.reader import RunFolder

FIGURES: dict[str, tuple[tuple[str, ...], str]] = {
    # name: tasks in order of preference; metric, or key in metrics.jsonl
    "held-out probe": ((), "probe_accuracy"),
    "held-out kNN": ((), "knn_accuracy"),
    "linear": (("linear",), "top-1"),
    "logistic": (("logistic",), "top-1"),
    "1 % labels": (("few labels 1%",), "top-1"),
    "kNN": (("kNN 20",), "top-1"),
    "corruptions": (("corruptions",), "top-1"),
    "Brier": (("linear", "logistic"), "brier"),
    "reducible_residual": (("information",), "reducible_residual"),
    "predictive": (("information",), "predictive"),
}
NATS = ("reducible_residual", "predictive")
# Metrics in metrics.jsonl: accuracies on held-out labels, for model selection; nats.
_FROM_METRICS = ("held-out probe", "held-out kNN", *NATS)
_ENDS = {"collapse": "collapsed", "nan": "diverged"}  # last health status: one word


class Spread(NamedTuple):
    """Mean and standard deviation of a metric over seeds."""

    mean: float
    std: float | None  # with n - 1 degrees of freedom; None for one seed
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of one or more values."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


def outcome(run: RunFolder) -> dict[str, float]:
    """Return metrics of a run on its own data; nats are of the evaluation, else of training."""
    return {name: next(iter(values.values())) for name, values in figures_by_origin(run).items()}


def figures_by_origin(run: RunFolder) -> dict[str, dict[str, float]]:
    """Return each metric by its origin (task and dataset, or training), the preferred one first.

    Only metrics of the same origin can be averaged or joined by a line.
    """
    home = run.evaluated.get("data")
    own = [f for f in run.records if home is None or f.dataset in (home, f"{home}-C")]
    result: dict[str, dict[str, float]] = {}
    for name, (tasks, metric) in FIGURES.items():
        measured = [f for task in tasks for f in own if (f.task, f.metric) == (task, metric)]
        found: dict[str, float] = {}
        for record in measured:
            found.setdefault(f"{record.task} on {record.dataset}", record.value)
        last = run.last(metric) if name in _FROM_METRICS else None
        if last is not None:
            found["training"] = last
        if found:
            result[name] = found
    return result


def failure(run: RunFolder) -> str:
    """Return how a run failed in one word, or "" if it did not.

    An encoder file does not mean success: it exists from the first step on.
    """
    if run.records or run.is_over:
        return ""
    words = (word for state, word in _ENDS.items() if (run.health or "").startswith(state))
    return next(words, "")
