"""Results as a person reads them: one table for a run, one for a comparison."""

from collections.abc import Sequence

from rich.table import Table

from compressive.evaluation.compare import Difference, Group
from compressive.evaluation.results import ACCURACIES, Record, Results

PERCENT = (*ACCURACIES, "ece")


def results_table(results: Results) -> Table:
    """One line for a task on a set, with its figures beside each other."""
    table = Table(title=results.run, caption="95 % intervals over test images; accuracies in %")
    for name in ("task", "data", "figures"):
        table.add_column(name, overflow="fold")
    lines: dict[tuple[str, str], list[str]] = {}
    for record in results.records:
        lines.setdefault((record.task, record.dataset), []).append(_words(record))
    for (task, dataset), figures in lines.items():
        table.add_row(task, dataset, "\n".join(figures))
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


def _words(record: Record) -> str:
    text = f"{record.metric} {_figure(record.metric, record.value)}"
    if record.low is not None and record.high is not None:
        low, high = (_figure(record.metric, end) for end in (record.low, record.high))
        text += f"  [{low}, {high}]"
    return text


def _figure(metric: str, value: float) -> str:
    """Per cent with one digit, the Brier score times 100 as in the paper, else three digits."""
    if metric in PERCENT:
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f}" if metric == "brier" else f"{value:.3g}"
