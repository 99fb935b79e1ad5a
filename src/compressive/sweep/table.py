"""The table of a sweep: a line for each setting, its figures over seeds, and what failed."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from compressive.report.summary import FIGURES, NATS, Spread, failure, outcome, spread
from compressive.rundir.reader import read_runs
from compressive.sweep.plan import Job

LEGEND = (
    "top-1 in %, held-out: on labels held out of train, to choose by; reducible residual: nats "
    "kept beyond "
    "what the other view tells; mean ± deviation over seeds; more figures are in the report"
)
# What a terminal of 80 has room for.
_SHOWN = (
    *("held-out probe", "held-out kNN", "linear", "logistic", "1 % labels", "kNN"),
    *("corruptions", "reducible_residual"),
)
_BROKEN = {
    "held-out probe": "held-out\nprobe",
    "held-out kNN": "held-out\nkNN",
    "1 % labels": "1 %\nlabels",
    "reducible_residual": "reducible\nresidual",
    "corruptions": "corrup-\ntions",
}


class SweepRow(NamedTuple):
    """A line of the table: a setting, how many of its seeds are done, and their figures."""

    setting: str
    varied: dict[str, str]
    done: int
    of: int
    figures: dict[str, Spread]
    failed: dict[str, int]  # how they ended: how many


def rows(
    out: Path, jobs: Sequence[Job], done: set[str], failed: set[str], *, held_out: bool = False
) -> list[SweepRow]:
    """Figures of the runs that are done, by setting; jobs of one setting stand together."""
    found = []
    for setting, group in itertools.groupby(jobs, lambda job: job.setting):
        of = list(group)
        each = [figures(out / job.name, held_out=held_out) for job in of if job.name in done]
        names = [name for name in FIGURES if any(name in one for one in each)]
        spreads = {name: spread([one[name] for one in each if name in one]) for name in names}
        ends = Counter(_end(out / job.name) for job in of if job.name in failed)
        found.append(SweepRow(setting, of[0].varied, len(each), len(of), spreads, dict(ends)))
    return found


def figures(folder: Path, *, held_out: bool = False) -> dict[str, float]:
    """What the run in this folder came to, on test images or on held-out ones."""
    (run,) = read_runs([folder], held_out=held_out)
    return outcome(run)


def _end(folder: Path) -> str:
    try:
        (run,) = read_runs([folder])
    except (OSError, ValueError):  # it failed before there was a run
        return "failed"
    return failure(run) or "failed"


def table(title: str, lines: Sequence[SweepRow]) -> Table:
    """One line for a setting: mean and deviation over its seeds."""
    drawn = Table(
        title=escape(title),
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    names = [name for name in _SHOWN if any(name in line.figures for line in lines)]
    if "linear" in names and "logistic" in names:
        names.remove("logistic")
    drawn.add_column("setting", overflow="fold")
    drawn.add_column("seeds", no_wrap=True)
    for name in names:
        drawn.add_column(_BROKEN.get(name, name), justify="right", overflow="fold")
    for line in lines:
        cells = [_format_spread(name, line.figures.get(name)) for name in names]
        drawn.add_row(escape(line.setting or "as given"), _seed_counts(line), *cells)
    return drawn


def _seed_counts(line: SweepRow) -> str:
    """How many are done, and what became of others."""
    if line.of == 1 and line.failed:
        return next(iter(line.failed))
    count = str(line.of) if line.done == line.of else f"{line.done} of {line.of}"
    return ", ".join([count, *(f"{many} {end}" for end, many in line.failed.items())])


def _format_spread(name: str, found: Spread | None) -> str:
    if found is None:
        return ""
    by, digits = (1, 2) if name in NATS else (100, 1)
    std = "" if found.std is None else f" ± {by * found.std:.{digits}f}"
    return f"{by * found.mean:.{digits}f}{std}"
