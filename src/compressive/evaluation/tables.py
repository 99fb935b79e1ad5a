"""Results as a person reads them: one table for a run, one for a comparison."""

from collections.abc import Sequence

from rich.table import Table

from compressive.evaluation.compare import Difference, Group
from compressive.evaluation.results import ACCURACIES, Record, Results

PERCENT = (*ACCURACIES, "ece", "brier")
_BESIDE = ("lipschitz_squared_kl", "mean per class")  # in the file, not in the table of a run


def results_table(results: Results) -> Table:
    """One line for a figure; what few look for is in the file alone."""
    table = Table(
        title=results.run,
        caption="accuracies, ECE and Brier x 100; 95 % intervals over test images",
    )
    for name in ("task", "data", "metric", "value", "interval"):
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    before = None
    for record in results.records:
        if record.metric in _BESIDE or record.task == "extra corruption":
            continue
        place = (record.task, record.dataset)
        figure, interval = _words(record)
        table.add_row(*(place if place != before else ("", "")), record.metric, figure, interval)
        before = place
    return table


def differences_table(first: Group, second: Group, found: Sequence[Difference]) -> Table:
    """Every figure of two groups side by side."""
    table = Table(
        title=f"A: {first.name}\nB: {second.name}",
        caption="difference B - A with its 95 % interval; each line is judged alone",
    )
    for name in ("figure", "A", "B", "B - A", "over", "B is"):
        table.add_column(name, justify="right" if name in "AB - A" else "left", overflow="fold")
    for each in found:
        metric = each.key.rpartition("/")[2]
        interval = ""
        if each.low is not None and each.high is not None:
            interval = f" [{_figure(metric, each.low)}, {_figure(metric, each.high)}]"
        table.add_row(
            each.key.replace("/", ", "),
            _figure(metric, each.first),
            _figure(metric, each.second),
            f"{_figure(metric, each.difference)}{interval}",
            each.over,
            each.verdict,
        )
    return table


def _words(record: Record) -> tuple[str, str]:
    interval = ""
    if record.low is not None and record.high is not None:
        low, high = (_figure(record.metric, end) for end in (record.low, record.high))
        interval = f"{low} to {high}"
    return _figure(record.metric, record.value), interval


def _figure(metric: str, value: float) -> str:
    """Times 100 with one digit as the paper has it, or three digits."""
    return f"{100 * value:.1f}" if metric in PERCENT else f"{value:.3g}"
