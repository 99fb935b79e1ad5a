"""What a run came to: the few figures by which runs are compared, and how it ended if it failed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from compressive.rundir.reader import Run

FIGURES: dict[str, tuple[tuple[str, ...], str]] = {
    # name: tasks it is taken from, the first that was done; metric
    "held-out probe": ((), ""),
    "held-out kNN": ((), ""),
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
# What a journal can tell: accuracies on labels held out of train, by which to choose; nats.
_JOURNAL = {
    "held-out probe": "probe_accuracy",
    "held-out kNN": "knn_accuracy",
    "reducible_residual": "reducible_residual",
    "predictive": "predictive",
}
_ENDS = {"collapse": "collapsed", "nan": "diverged"}  # what the monitor said last: in one word


class Spread(NamedTuple):
    """A figure over seeds."""

    mean: float
    std: float | None  # with n - 1 below; one seed has none
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation of one value or more."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


def outcome(run: Run) -> dict[str, float]:
    """Figures of a run on its own images; nats of new views of them, else the last in training."""
    return {name: next(iter(values.values())) for name, values in told(run).items()}


def told(run: Run) -> dict[str, dict[str, float]]:
    """Each figure of a run by what it is from, the best first: task and set, or the journal.

    Only figures from the same can be averaged or joined by a line.
    """
    home = run.evaluated.get("data")
    own = [f for f in run.figures if home is None or f.dataset in (home, f"{home}-C")]
    result: dict[str, dict[str, float]] = {}
    for name, (tasks, metric) in FIGURES.items():
        measured = [f for task in tasks for f in own if (f.task, f.metric) == (task, metric)]
        found: dict[str, float] = {}
        for figure in measured:
            found.setdefault(f"{figure.task} on {figure.dataset}", figure.value)
        last = run.last(_JOURNAL[name]) if name in _JOURNAL else None
        if last is not None:
            found["training"] = last
        if found:
            result[name] = found
    return result


def failure(run: Run) -> str:
    """How a run ended before its time, in one word; none if it did not fail.

    There is an encoder from the first step on, so that it proves nothing.
    """
    if run.figures or run.is_over:
        return ""
    words = (word for state, word in _ENDS.items() if (run.health or "").startswith(state))
    return next(words, "")
