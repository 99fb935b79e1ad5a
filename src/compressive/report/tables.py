"""Tables: the figures of runs side by side, corruptions by severity, the paper's, settings."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.metric_info import ACCURACIES, DESCRIPTIONS, HIGHER, LOWER, PERCENT
from compressive.recipes import paper
from compressive.report.svg import minus
from compressive.rundir.reader import Figure, Run, number

_ORDER = ("linear", "logistic", "few labels", "kNN", "geometry", "information", "corruptions")


class Cell(NamedTuple):
    """A number as printed, exactly, and how far it goes to its end of a color scale."""

    text: str
    value: float
    note: str = ""
    share: float = 0.0


class Row(NamedTuple):
    """What is measured, and a cell (or none) for each run, or for each severity."""

    name: str
    note: str
    cells: Sequence[Cell | None]


class Table(NamedTuple):
    """Rows under a title, with the note that all share, or of the run of a number."""

    title: str
    rows: Sequence[Row]
    note: str = ""
    heads: Sequence[str] = ()
    run: int | None = None


class Verdicts(NamedTuple):
    """Two experiments side by side, as `compressive compare` says it: all as text."""

    first: str
    second: str
    lines: Sequence[tuple[str, ...]]  # figure, first, second, difference with its interval, verdict
    note: str


def headline(run: Run, metric: str) -> Figure | None:
    """The linear evaluation of the run's own data, as the paper has it if that was done."""
    home = run.evaluated.get("data")
    own = [f for f in run.figures if home is None or f.dataset == home] or run.figures
    found = {f.task: f for f in reversed(own) if f.metric == metric}
    return found.get("linear") or found.get("logistic")


def digits(value: float) -> str:
    """Four digits, zeros at the end too; more before the point than that, and two behind it."""
    return minus(f"{value:#.4g}" if abs(value) < 100 else f"{value:,.2f}")


def cell(figure: Figure) -> Cell:
    """A figure as it stands in a table, accuracies in percent."""
    percent = figure.metric in PERCENT

    def text(value: float) -> str:
        return minus(f"{100 * value:.1f}") if percent else digits(value)

    low, high = figure.low, figure.high
    note = "" if low is None or high is None else f"[{text(low)},\N{NO-BREAK SPACE}{text(high)}]"
    unit = "\N{NO-BREAK SPACE}%" if figure.metric in ACCURACIES else ""
    return Cell(text(figure.value) + unit, figure.value, note)


def tables(runs: Sequence[Run]) -> list[Table]:
    """All numbers but those drawn elsewhere, a table for each kind of task."""
    rows: dict[str, dict[tuple[str, str, str], list[Figure | None]]] = {}
    for place, run in enumerate(runs):
        for figure in run.figures:
            if "by_severity" in figure.protocol or figure.task.startswith("smoothness "):
                continue
            family = re.sub(r"\s+[\d.]+\s*%?$", "", figure.task)
            key = (figure.task, figure.dataset, figure.metric)
            rows.setdefault(family, {}).setdefault(key, [None] * len(runs))[place] = figure
    rank = {name: place for place, name in enumerate(_ORDER)}
    families = sorted(rows, key=lambda name: rank.get(name, len(rank)))
    found = []
    for name in families:
        lines = [_row(name, *item) for item in rows[name].items()]
        shared = {line.note for line in lines}
        found.append(Table(name, lines, note=shared.pop() if len(shared) == 1 else ""))
    return found


def terms(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Metrics of the tables, and what they are."""
    there = {figure.metric for run in runs for figure in run.figures}
    return [(metric, words) for metric, words in DESCRIPTIONS.items() if metric in there]


def _row(family: str, key: tuple[str, str, str], figures: Sequence[Figure | None]) -> Row:
    there = [figure for figure in figures if figure]
    counts = {figure.n for figure in there if figure.n}
    note = key[1] + (f", {counts.pop():,} images" if len(counts) == 1 else "")
    if len({figure.of for figure in there}) > 1:
        note += "; not the same images, so not to be compared"
    cells = [cell(figure) if figure else None for figure in figures]
    which = key[0].removeprefix(family).strip()  # how many labels, or neighbors
    name = f"{which}, {key[2]}" if which else key[2]
    if isinstance(on := there[0].protocol.get("on"), str):  # "h, centered; by ..."
        name += f" of {on.partition(';')[0]}"
    if key[2] in PERCENT and key[2] not in ACCURACIES:
        name += " \N{MULTIPLICATION SIGN} 100"
    way = "\N{UPWARDS ARROW}" * (key[2] in HIGHER) + "\N{DOWNWARDS ARROW}" * (key[2] in LOWER)
    return Row(f"{name}\N{NO-BREAK SPACE}{way}" if way else name, note, cells)


def numbers(values: object) -> list[float]:
    """A list of finite numbers, or nothing."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return [] if None in found else [value for value in found if value is not None]


def heat(runs: Sequence[Run]) -> list[Table]:
    """Accuracy by type and severity for each run, then how the others differ from the first."""
    grids: dict[str, dict[int, dict[str, list[float]]]] = {}
    by: dict[tuple[str, int], tuple[str, str]] = {}  # which images, and which head
    for place, run in enumerate(runs):
        for figure in run.figures:
            cells = numbers(figure.protocol.get("by_severity"))
            if cells and figure.metric == "top-1":
                dataset, _, kind = figure.dataset.rpartition(" ")
                grids.setdefault(dataset, {}).setdefault(place, {})[kind] = cells
                by[dataset, place] = figure.of, str(figure.protocol.get("head"))
    tables = []
    for dataset, by_run in grids.items():
        for place, grid in by_run.items():
            tables.append(_heat_table(f"{dataset}: accuracy, %", place, grid, 1.0))
        first, *others = by_run
        alike = [place for place in others if by[dataset, place] == by[dataset, first]]
        gaps = {place: _gap(by_run[first], by_run[place]) for place in alike}
        sizes = (abs(v) for gap in gaps.values() for cells in gap.values() for v in cells)
        most = max(sizes, default=0.0) or 1.0  # one scale for all
        title = f"{dataset}: minus {runs[first].name}, points; full color at {100 * most:.1f}"
        tables += [
            _heat_table(title, place, gap, most, sign="+") for place, gap in gaps.items() if gap
        ]
    return tables


def corruptions(runs: Sequence[Run]) -> list[str]:
    """What the means over corruptions are of, and what judged; of which runs, if not of all."""
    told: dict[str, dict[str, None]] = {}
    for run in runs:
        for figure in run.figures:
            if figure.metric == "top-1" and "left_out" in figure.protocol:
                for sentence in (_mean(figure, run), _judge(figure)):
                    told.setdefault(sentence, {})[run.name] = None
    every = {name for names in told.values() for name in names}
    return [
        f"{sentence}." if len(names) == len(every) else f"{sentence} ({', '.join(names)})."
        for sentence, names in told.items()
    ]


def _mean(figure: Figure, run: Run) -> str:
    left = figure.protocol["left_out"]
    left = list(map(str, left)) if isinstance(left, list) else []
    shown = {f.dataset for f in run.figures if "by_severity" in f.protocol}
    extra = [kind for kind in EXTRAS if f"{figure.dataset} {kind}" in shown]
    count = f"{len(NAMES) - len(left)} types \N{MULTIPLICATION SIGN} 5 severities"
    words = f"The mean of {figure.dataset} is of {count}"
    words += f", without {_listed(left)}" if left else ""
    return words + (f"; {_listed(extra)} are shown, but not in it" if extra else "")


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds).replace("_", " ")


def _judge(figure: Figure) -> str:
    chosen = figure.protocol.get("chosen")
    chosen = chosen.items() if isinstance(chosen, dict) else ()
    words = [str(figure.protocol.get("head", "?")), *(f"{name}: {value}" for name, value in chosen)]
    return f"Judged by {', '.join(words)}"


def _gap(one: Mapping[str, list[float]], two: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Second minus first, where both have as many severities."""
    both = [kind for kind in one if len(one[kind]) == len(two.get(kind, []))]
    return {k: [b - a for a, b in zip(one[k], two[k], strict=True)] for k in both}


def _heat_table(
    title: str, run: int, grid: Mapping[str, list[float]], most: float, *, sign: str = ""
) -> Table:
    rows = [
        Row(kind, "", [Cell(minus(f"{100 * v:{sign}z.1f}"), v, "", v / most) for v in cells])
        for kind, cells in grid.items()
    ]
    heads = [str(place + 1) for place in range(max(len(row.cells) for row in rows))]
    rows = [
        row._replace(cells=[*row.cells, *[None] * (len(heads) - len(row.cells))]) for row in rows
    ]
    return Table(title, rows, heads=heads, run=run)


def beside_paper(runs: Sequence[Run]) -> list[Row]:
    """Table 1 for the methods of these runs, each followed by the runs: other data, other sizes."""
    rows = []
    for method in paper.PAPER_METHODS:
        mine = [run for run in runs if run.settings.get("method") == method]
        ours = [(run, headline(run, "top-1")) for run in mine]
        if not any(best for _, best in ours):
            continue
        for network, epochs in dict.fromkeys(_theirs(run) for run, best in ours if best):
            top1, _, top5, brier = paper.TABLE_1[method, network, epochs]
            cells = [Cell(f"{v:.1f}", v) for v in (top1, top5, brier)]
            size = f"{paper.NETWORKS[network][2]}, {epochs} epochs"
            rows.append(Row(f"{method} in the paper", f"ImageNet, {size}", cells))
        for run, best in ours:
            if best is None:
                continue
            figures = [headline(run, metric) for metric in ("top-1", "top-5", "brier")]
            cells = [f and Cell(f"{100 * f.value:.1f}", f.value) for f in figures]
            steps, epochs = (run.settings.get(f"train.{key}") for key in ("steps", "epochs"))
            length = f"{steps} steps" if steps else f"{'?' if epochs is None else epochs} epochs"
            size = f"{run.settings.get('network.name', '?')}, {length}"
            rows.append(Row(f"{run.name} here", f"{best.dataset}, {size}; {best.task}", cells))
    return rows


def _theirs(run: Run) -> tuple[str, int]:
    """Network and epochs of the paper's run that this one repeats, or else of its shortest."""
    found = re.fullmatch(r"[\w-]+/imagenet-(r50(?:x2)?)-(\d+)", str(run.settings.get("recipe")))
    if found and (run.settings["method"], found[1], int(found[2])) in paper.TABLE_1:
        return found[1], int(found[2])
    return "r50", 300


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that not all runs share."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [
        (n, [json.dumps(r.settings[n]) if n in r.settings else "" for r in runs]) for n in names
    ]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
