"""The table of an evaluation for the terminal and for notebooks."""

import math
from collections.abc import Sequence
from html import escape

from rich.table import Table

from compressive.metric_info import PERCENT
from compressive.rundir.records import ResultsFile

SCALE = "accuracies, ECE and Brier x 100"
_RESULT_COLUMNS = ("task", "data", "metric", "value", "interval")
_RESULT_CAPTION = f"{SCALE}; 95 % intervals over test images"


def results_table(results: ResultsFile) -> Table:
    """Return a table with one line per metric; rarely needed ones are in the file only."""
    table = Table(title=results.run, caption=_caption_with_times(results))
    for name in _RESULT_COLUMNS:
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    for row in _result_rows(results):
        table.add_row(*row)
    return table


def _caption_with_times(results: ResultsFile) -> str:
    """Return the caption, with the seconds of each task if they are known."""
    parts = [f"{name} {value:.1f}" for name, value in results.seconds.items()]
    return f"{_RESULT_CAPTION}\nseconds: {', '.join(parts)}" if parts else _RESULT_CAPTION


def _result_rows(results: ResultsFile) -> list[tuple[str, ...]]:
    """Return task, data, metric, value and interval as text; repeated names are left out."""
    rows, before = list[tuple[str, ...]](), None
    for record in results.records:
        if is_hidden(record.task, record.metric):
            continue
        place = (record.task, record.dataset)
        figure, interval = _format_value(record.metric, record.value), ""
        if record.low is not None and record.high is not None:
            ends = (_format_value(record.metric, end) for end in (record.low, record.high))
            interval = " to ".join(ends)
        rows.append((*(place if place != before else ("", "")), record.metric, figure, interval))
        before = place
    return rows


def results_html(results: ResultsFile) -> str:
    """Return the metrics of `results_table` as HTML, for notebooks."""
    rows = _result_rows(results)
    return html_table(_RESULT_COLUMNS, rows, f"{results.run}: {_RESULT_CAPTION}")


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table as HTML with escaped text."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><caption>{escape(caption)}</caption>{row(columns, 'th')}{body}</table>"


def is_hidden(task: str, metric: str) -> bool:
    """Return whether a metric is in the file only because it is rarely needed."""
    if metric == "mean per class":
        return task != "transfer"  # the paper reports it for four transfer datasets
    return metric == "lipschitz_squared_kl" or task == "extra corruption"


def _format_value(metric: str, value: float) -> str:
    """Format a percentage with one decimal as in the paper, or another value with three digits."""
    return f"{100 * value:.1f}" if metric in PERCENT else f"{value:#.3g}".removesuffix(".")


def decimals(size: float, digits: int) -> int:
    """Return the decimals needed to show this many significant digits."""
    if not 0 < size < math.inf:
        return 0 if size == 0 else 2
    return min(6, max(0, digits - 1 - math.floor(math.log10(size))))
