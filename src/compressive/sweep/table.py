"""The table of a sweep: one row per setting with means over seeds, and failures."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from compressive.metric_info import ONE_SEED
from compressive.reporting.summary import FIGURES, NATS, Spread, failure, outcome, spread
from compressive.rundir.reader import read_runs
from compressive.sweep.plan import PlannedRun

_LEGEND = (
    "top-1 in %; held-out: accuracy on labels held out of the training split, for tuning; "
    "reducible residual: nats beyond what the other view predicts; mean ± standard deviation over "
    "seeds; the report has more metrics"
)
# Columns that fit into 80 characters.
_SHOWN = (
    *("held-out probe", "held-out kNN", "linear", "logistic", "1 % labels", "kNN"),
    *("corruptions", "reducible_residual"),
)
_WRAPPED = {
    "held-out probe": "held-out\nprobe",
    "held-out kNN": "held-out\nkNN",
    "1 % labels": "1 %\nlabels",
    "reducible_residual": "reducible\nresidual",
    "corruptions": "corrup-\ntions",
}


class SweepRow(NamedTuple):
    """A row of the table: a setting, how many of its seeds are done, and their metrics."""

    setting: str
    varied: dict[str, str]
    done: int
    of: int
    figures: dict[str, Spread]
    failed: dict[str, int]  # kind of failure -> how many runs


def sweep_rows(
    out: Path,
    runs: Sequence[PlannedRun],
    done: set[str],
    failed: set[str],
    *,
    held_out: bool = False,
) -> list[SweepRow]:
    """Return one row per setting from the runs that are done; its seeds must be adjacent."""
    found = []
    for setting, group in itertools.groupby(runs, lambda run: run.label):
        seeds = list(group)
        each = [run_figures(out / run.name, held_out=held_out) for run in seeds if run.name in done]
        names = [name for name in FIGURES if any(name in one for one in each)]
        spreads = {name: spread([one[name] for one in each if name in one]) for name in names}
        failures = Counter(_kind_of_failure(out / run.name) for run in seeds if run.name in failed)
        row = SweepRow(setting, seeds[0].varied, len(each), len(seeds), spreads, dict(failures))
        found.append(row)
    return found


def run_figures(folder: Path, *, held_out: bool = False) -> dict[str, float]:
    """Return the metrics of a run, on test images or on held-out ones."""
    (run,) = read_runs([folder], held_out=held_out)
    return outcome(run)


def _kind_of_failure(folder: Path) -> str:
    try:
        (run,) = read_runs([folder])
    except (OSError, ValueError):  # it failed before it wrote anything
        return "failed"
    return failure(run) or "failed"


def sweep_table(title: str, rows: Sequence[SweepRow]) -> Table:
    """Draw one row per setting with mean and standard deviation over its seeds."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    names = [name for name in _SHOWN if any(name in row.figures for row in rows)]
    if "linear" in names and "logistic" in names:
        names.remove("logistic")
    table.add_column("setting", overflow="fold")
    table.add_column("seeds", no_wrap=True)
    for name in names:
        table.add_column(_WRAPPED.get(name, name), justify="right", overflow="fold")
    for row in rows:
        cells = [_format_spread(name, row.figures.get(name)) for name in names]
        table.add_row(escape(row.setting or "as given"), _format_seeds(row), *cells)
    return table


def legend(rows: Sequence[SweepRow]) -> str:
    """Explain the columns, and the limits of single seeds."""
    return f"{_LEGEND}; {ONE_SEED}" if any(row.done == 1 for row in rows) else _LEGEND


def _format_seeds(row: SweepRow) -> str:
    """Return how many seeds are done and how the others failed."""
    if row.of == 1 and row.failed:
        return next(iter(row.failed))
    count = str(row.of) if row.done == row.of else f"{row.done} of {row.of}"
    return ", ".join([count, *(f"{many} {kind}" for kind, many in row.failed.items())])


def _format_spread(name: str, found: Spread | None) -> str:
    if found is None:
        return ""
    scale, digits = (1, 2) if name in NATS else (100, 1)
    std = "" if found.std is None else f" ± {scale * found.std:.{digits}f}"
    return f"{scale * found.mean:.{digits}f}{std}"
