"""Tables of the report: records, corruptions by severity, the paper's results, settings."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.metric_info import ACCURACIES, DESCRIPTIONS, HIGHER, LOWER, PERCENT
from compressive.recipes import paper
from compressive.reporting.labels import method_name
from compressive.reporting.svg import minus
from compressive.rundir.reader import RunFolder
from compressive.rundir.records import Record, finite_number

_TASK_ORDER = ("linear", "logistic", "few labels", "kNN", "geometry", "information", "corruptions")


class NumberCell(NamedTuple):
    """A number as printed, its exact value, and its position on a color scale."""

    text: str
    value: float
    note: str = ""
    share: float = 0.0


class ReportRow(NamedTuple):
    """A name and one cell per run or per severity."""

    name: str
    note: str
    cells: Sequence[NumberCell | None]


class ReportTable(NamedTuple):
    """Rows under a title."""

    title: str
    rows: Sequence[ReportRow]
    note: str = ""  # shared by all rows
    heads: Sequence[str] = ()
    run: int | None = None  # position of the run, if the table is of one run


def headline(run: RunFolder, metric: str) -> Record | None:
    """Return the linear evaluation on the run's own data, else the logistic regression."""
    home = run.evaluated.get("data")
    own = [f for f in run.records if home is None or f.dataset == home] or run.records
    found = {f.task: f for f in reversed(own) if f.metric == metric}
    return found.get("linear") or found.get("logistic")


def format_digits(value: float) -> str:
    """Format with four significant digits; from 100 on with two decimals."""
    return minus(f"{value:#.4g}" if abs(value) < 100 else f"{value:,.2f}")


def number_cell(record: Record) -> NumberCell:
    """Format a record for a table, accuracies in percent."""
    percent = record.metric in PERCENT

    def text(value: float) -> str:
        return minus(f"{100 * value:.1f}") if percent else format_digits(value)

    low, high = record.low, record.high
    note = "" if low is None or high is None else f"[{text(low)},\N{NO-BREAK SPACE}{text(high)}]"
    unit = "\N{NO-BREAK SPACE}%" if record.metric in ACCURACIES else ""
    return NumberCell(text(record.value) + unit, record.value, note)


def record_tables(runs: Sequence[RunFolder]) -> list[ReportTable]:
    """Return one table per kind of task, without numbers that are drawn."""
    rows: dict[str, dict[tuple[str, str, str], list[Record | None]]] = {}
    for place, run in enumerate(runs):
        for record in run.records:
            if "by_severity" in record.protocol or record.task.startswith("smoothness "):
                continue
            family = re.sub(r"\s+[\d.]+\s*%?$", "", record.task)
            family = "invariance" if family.startswith("invariance ") else family
            key = (record.task, record.dataset, record.metric)
            rows.setdefault(family, {}).setdefault(key, [None] * len(runs))[place] = record
    found = []
    for name in sorted(rows, key=lambda name: (*_TASK_ORDER, name).index(name)):
        lines = [_record_row(name, *item) for item in rows[name].items()]
        shared = {line.note for line in lines}
        found.append(ReportTable(name, lines, note=shared.pop() if len(shared) == 1 else ""))
    return found


def metric_descriptions(runs: Sequence[RunFolder]) -> list[tuple[str, str]]:
    """Return the metrics of the runs that need an explanation, and the explanation."""
    there = {record.metric for run in runs for record in run.records}
    return [(metric, words) for metric, words in DESCRIPTIONS.items() if metric in there]


def _record_row(
    family: str, key: tuple[str, str, str], records: Sequence[Record | None]
) -> ReportRow:
    there = [record for record in records if record]
    counts = {record.n for record in there if record.n}
    note = key[1] + (f", {counts.pop():,} images" if len(counts) == 1 else "")
    if len({record.image_set for record in there}) > 1:
        note += "; not the same images, so do not compare these values"
    cells = [number_cell(record) if record else None for record in records]
    which = key[0].removeprefix(family).strip()  # number of labels or neighbors
    name = f"{which}, {key[2]}" if which else key[2]
    if isinstance(on := there[0].protocol.get("on"), str):  # "h, centered; by ..."
        name += f" of {on.partition(';')[0]}"
    if key[2] in PERCENT and key[2] not in ACCURACIES:
        name += " \N{MULTIPLICATION SIGN} 100"
    way = "\N{UPWARDS ARROW}" * (key[2] in HIGHER) + "\N{DOWNWARDS ARROW}" * (key[2] in LOWER)
    return ReportRow(f"{name}\N{NO-BREAK SPACE}{way}" if way else name, note, cells)


def finite_numbers(values: object) -> list[float]:
    """Return a list of finite numbers, or an empty list if any is not."""
    found = [finite_number(value) for value in values] if isinstance(values, list) else []
    return [] if None in found else [value for value in found if value is not None]


def corruption_tables(
    runs: Sequence[RunFolder], groups: Sequence[Sequence[int]]
) -> list[ReportTable]:
    """Return accuracy by type and severity, then differences from the first run.

    Of each group of runs, show the first one that has corruptions.
    """
    grids: dict[str, dict[int, dict[str, list[float]]]] = {}
    by: dict[tuple[str, int], tuple[str, str]] = {}  # image set and classification head
    for group in groups:
        place = next((i for i in group if _has_corruptions(runs[i])), group[0])
        for record in runs[place].records:
            cells = finite_numbers(record.protocol.get("by_severity"))
            if cells and record.metric == "top-1":
                dataset, _, kind = record.dataset.rpartition(" ")
                grids.setdefault(dataset, {}).setdefault(place, {})[kind] = cells
                by[dataset, place] = record.image_set, str(record.protocol.get("head"))
    tables = []
    for dataset, by_run in grids.items():
        for place, grid in by_run.items():
            tables.append(_corruption_table(f"{dataset}: accuracy, %", place, grid, 1.0))
        first, *others = by_run
        alike = [place for place in others if by[dataset, place] == by[dataset, first]]
        gaps = {place: _severity_gaps(by_run[first], by_run[place]) for place in alike}
        sizes = (abs(v) for gap in gaps.values() for cells in gap.values() for v in cells)
        most = max(sizes, default=0.0) or 1.0  # one scale for all
        title = f"{dataset}: minus {runs[first].name}, points; full color at {100 * most:.1f}"
        for place, gap in gaps.items():
            if gap:
                tables.append(_corruption_table(title, place, gap, most, sign="+"))
    return tables


def _has_corruptions(run: RunFolder) -> bool:
    return any("by_severity" in record.protocol for record in run.records)


def corruption_notes(runs: Sequence[RunFolder]) -> list[str]:
    """Return which corruptions the means contain and which classifier was used."""
    runs_of: dict[str, dict[str, None]] = {}
    for run in runs:
        for record in run.records:
            if record.metric == "top-1" and "left_out" in record.protocol:
                for sentence in (_mean_note(record, run), _classifier_note(record)):
                    runs_of.setdefault(sentence, {})[run.name] = None
    every = {name for names in runs_of.values() for name in names}
    return [
        f"{sentence}." if len(names) == len(every) else f"{sentence} ({', '.join(names)})."
        for sentence, names in runs_of.items()
    ]


def _mean_note(record: Record, run: RunFolder) -> str:
    left = record.protocol["left_out"]
    left = list(map(str, left)) if isinstance(left, list) else []
    shown = {f.dataset for f in run.records if "by_severity" in f.protocol}
    extra = [kind for kind in EXTRAS if f"{record.dataset} {kind}" in shown]
    without, more = (", ".join(kinds).replace("_", " ") for kinds in (left, extra))
    count = f"{len(NAMES) - len(left)} types \N{MULTIPLICATION SIGN} 5 severities"
    words = f"The mean of {record.dataset} is over {count}" + (
        f", without {without}" if left else ""
    )
    return words + (f"; {more} are shown but not included" if extra else "")


def _classifier_note(record: Record) -> str:
    chosen = record.protocol.get("chosen")
    chosen = chosen.items() if isinstance(chosen, dict) else ()
    words = [f"{name.replace('_', ' ')}: {value}" for name, value in chosen]
    return f"The classifier is {', '.join([str(record.protocol.get('head', '?')), *words])}"


def _severity_gaps(
    one: Mapping[str, list[float]], two: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Return second minus first, if both have the same severities."""
    both = [kind for kind in one if len(one[kind]) == len(two.get(kind, []))]
    return {k: [b - a for a, b in zip(one[k], two[k], strict=True)] for k in both}


def _corruption_table(
    title: str, run: int, grid: Mapping[str, list[float]], most: float, *, sign: str = ""
) -> ReportTable:
    heads = [str(place + 1) for place in range(max(map(len, grid.values())))]
    rows = []
    for kind, values in grid.items():
        cells = [NumberCell(minus(f"{100 * v:{sign}z.1f}"), v, "", v / most) for v in values]
        rows.append(ReportRow(kind, "", [*cells, *[None] * (len(heads) - len(cells))]))
    return ReportTable(title, rows, heads=heads, run=run)


def paper_rows(runs: Sequence[RunFolder]) -> list[ReportRow]:
    """Return rows of the paper's Table 1 for the methods of these runs, followed by the runs."""
    rows = []
    for method in paper.PAPER_METHODS:
        mine = [run for run in runs if run.settings.get("method") == method]
        ours = [(run, best) for run in mine if (best := headline(run, "top-1")) is not None]
        for network, epochs in dict.fromkeys(_paper_run(run) for run, _ in ours):
            top1, _, top5, brier = paper.TABLE_1[method, network, epochs]
            cells = [NumberCell(f"{v:.1f}", v) for v in (top1, top5, brier)]
            size = f"{paper.NETWORKS[network][2]}, {epochs} epochs"
            rows.append(
                ReportRow(f"{method_name(method)} in the paper", f"ImageNet, {size}", cells)
            )
        for run, best in ours:
            records = [headline(run, metric) for metric in ("top-1", "top-5", "brier")]
            cells = [f and NumberCell(f"{100 * f.value:.1f}", f.value) for f in records]
            steps, epochs = (run.settings.get(f"train.{key}") for key in ("steps", "epochs"))
            length = f"{steps} steps" if steps else f"{'?' if epochs is None else epochs} epochs"
            size = f"{run.settings.get('network.name', '?')}, {length}"
            note = f"{best.dataset}, {size}; {best.task}"
            rows.append(ReportRow(f"{run.name} here", note, cells))
    return rows


def _paper_run(run: RunFolder) -> tuple[str, int]:
    """Return network and epochs of the paper's run that this one repeats, else of its shortest."""
    found = re.fullmatch(r"[\w-]+/imagenet-(r50(?:x2)?)-(\d+)", str(run.settings.get("recipe")))
    if found and (run.settings["method"], found[1], int(found[2])) in paper.TABLE_1:
        return found[1], int(found[2])
    return "r50", 300


def setting_differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [json.dumps(r.settings[name]) if name in r.settings else "" for r in runs]
        if len(set(values)) > 1:
            found.append((name, values))
    return found
