"""Compare and report runs, given by their folders: `compressive.compare` and `report`."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from compressive.evaluation import comparison_table
from compressive.evaluation.compare import Difference, Experiment, compare, open_groups
from compressive.rundir.files import CONFIG, RESULTS, local_path
from compressive.rundir.reader import results_of


class Comparison(NamedTuple):
    """Two experiments and the difference of every metric that both have."""

    first: Experiment
    second: Experiment
    differences: Sequence[Difference]

    def __repr__(self) -> str:
        names = f"A: {self.first.name}, B: {self.second.name}"
        return f"<Comparison {names}: {comparison_table.overall_verdict(self.differences)}>"

    def _repr_html_(self) -> str:
        return comparison_table.differences_html(*self)

    def table(self, *, width: int = 80) -> Table:
        """Return the table that `compressive compare` prints."""
        return comparison_table.differences_table(*self, width=width)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return comparison_table.differences_markdown(*self)


class Comparisons(tuple[Comparison, ...]):
    """The first experiment compared with each of the others."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))

    def _repr_html_(self) -> str:
        return "\n".join(each._repr_html_() for each in self)


def compare_runs(*runs: str | Path) -> Comparisons:
    """Compare the first run with each of the others; see `compressive compare --help`.

    Runs are folders of runs or sweeps, or results.json files. Runs that differ only in their seed
    form one experiment.
    """
    first, *others = open_groups([str(results_folder(run)) for run in expand_sweeps(runs)])
    if not others:
        hint = "`compressive report` shows runs of one experiment side by side"
        raise ValueError(f"compare needs two runs that differ in more than their seed; {hint}")
    found = Comparisons(Comparison(first, other, compare(first, other)) for other in others)
    for each in found:
        if not each.differences:
            raise ValueError(f"{first.name} and {each.second.name} have no metric in common")
    return found


def report_runs(*runs: str | Path, out: str | Path | None = None, held_out: bool = False) -> Path:
    """Write one HTML page about one run or several; return its path.

    Runs are folders of runs or sweeps. `out` is the page to write; by default it is report.html in
    the folder if there is only one, or in the current folder. `held_out` shows results on held-out
    training images.
    """
    from compressive.reporting.page import write_report

    folders = expand_sweeps(runs)
    verdicts = comparison_table.verdicts(folders, held_out=held_out)
    if out is None:
        out = Path(runs[0], "report.html") if len(runs) == 1 else "report.html"
    return write_report(folders, local_path(out), held_out=held_out, verdicts=verdicts)


def expand_sweeps(runs: Sequence[str | Path]) -> list[Path]:
    """Return folders of runs; replace a folder of runs, such as that of a sweep, by its runs."""
    paths = [local_path(run) for run in runs]
    return list(chain.from_iterable(_runs_inside(path) or [path] for path in paths))


def _runs_inside(path: Path) -> list[Path]:
    is_run = (path / CONFIG).exists() or (path / RESULTS).exists() or not path.is_dir()
    return [] if is_run else runs_of_sweep(path)


def runs_of_sweep(out: Path) -> list[Path]:
    """Return the folders of the runs that a sweep has started."""
    return sorted(path.parent for path in out.glob(f"*/{CONFIG}"))


def results_folder(run: Path) -> Path:
    """Return the folder with the results of a run, or the path itself."""
    inside = results_of(run)
    return inside if inside.is_dir() else run
