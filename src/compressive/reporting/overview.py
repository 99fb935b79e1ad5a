"""The top of the report: title, data set, one sentence with the verdict, and the main metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from typing import NamedTuple

from compressive.metric_info import ACCURACIES, HIGHER, LOWER
from compressive.reporting.labels import Labels, method_name
from compressive.reporting.summary import failure
from compressive.reporting.tables import NumberCell, number_cell
from compressive.reporting.verdict import NOT_TESTED, TOO_FEW, verdict_sentence
from compressive.rundir.intervals import mean_part, t_interval
from compressive.rundir.reader import RunFolder
from compressive.rundir.records import ComparisonText, Record

_METRIC_COLUMNS = (  # title; tasks in order of preference, with * for any ending; metric
    ("Linear", ("linear", "logistic"), "top-1"),
    ("kNN", ("kNN 20", "kNN *"), "top-1"),
    ("Few labels", ("few labels 1%", "few labels *"), "top-1"),
    ("Corruptions", ("corruptions",), "top-1"),
    ("Smoothness", ("smoothness",), "lipschitz"),
    ("Color invariance", ("invariance",), "relative_distance"),
    ("Calibration", ("linear", "logistic"), "ece"),
    ("Brier score", ("linear", "logistic"), "brier"),
    ("Shared information", ("information",), "predictive"),
    ("Residual information", ("information",), "reducible_residual"),
)
_ONLY_IF_MEASURED = ("Color invariance",)  # earlier results and the quick start lack it
_UNITS = {
    "top-1": "top-1",
    "lipschitz": "Lipschitz estimate",
    "relative_distance": "relative distance, %",
    "ece": "ECE \N{MULTIPLICATION SIGN} 100",
    "brier": "\N{MULTIPLICATION SIGN} 100",
    "predictive": "nats",
    "reducible_residual": "reducible, nats",
}
_VERDICTS = {  # those that name no experiment
    "networks differ": "these networks differ",
    "undecided": "undecided",
    "one number each": "no interval",
    "too few images": TOO_FEW,
    "measured differently": "measured differently",
}


class MetricColumn(NamedTuple):
    """A metric of the table, and the verdict on it."""

    title: str
    note: str  # task, unit and direction
    key: str  # of the records; "" if no run has any
    verdict: str = ""
    winner: int | None = None  # experiment that the corrected verdict supports


class OverviewRow(NamedTuple):
    """The metrics of an experiment."""

    experiment: int
    note: str
    cells: Sequence[NumberCell | None]


class Overview(NamedTuple):
    """Title, facts and verdict of a report, and a table of experiments by metric."""

    title: str
    facts: str
    sentence: str
    columns: Sequence[MetricColumn]
    rows: Sequence[OverviewRow]
    note: str


def overview(
    runs: Sequence[RunFolder], labels: Labels, verdicts: ComparisonText | None, today: date
) -> Overview:
    """Return the top of the page; the table is empty if no run was evaluated."""
    tested = [n for n, e in enumerate(labels.experiments) if any(runs[i].records for i in e.runs)]
    columns = [_column(spec, runs, labels, tested, verdicts) for spec in _METRIC_COLUMNS]
    columns = [each for each in columns if each.key or each.title not in _ONLY_IF_MEASURED]
    rows = [_row(number, runs, labels, columns) for number in range(len(labels.experiments))]
    return Overview(
        title=_title(runs, labels),
        facts=_facts(runs, labels, today),
        sentence=_sentence(labels, tested, columns, rows, verdicts),
        columns=columns if tested else [],
        rows=rows if tested else [],
        note=_note(runs, labels, columns, verdicts),
    )


def main_metric(run: RunFolder, columns: Sequence[MetricColumn]) -> str:
    """Return the metric of the first column for one run, so that all cards show the same one."""
    if not columns or not columns[0].key:
        return NOT_TESTED
    key = columns[0].key
    task, metric = key.partition("/")[0], key.rpartition("/")[2]
    record = next((r for r in _own_records(run) if r.key == key), None)
    if record is None:
        return f"{task} {metric} {NOT_TESTED}"
    cell = number_cell(record)
    return f"{task} {metric} {cell.text} {cell.note}".strip()


def data_name(run: RunFolder) -> str:
    """Return the data set that a run was evaluated on, or else trained on."""
    name = run.evaluated.get("data") or run.settings.get("data.source") or ""
    return str(name).removeprefix("\N{HORIZONTAL ELLIPSIS}/")


def _own_records(run: RunFolder) -> list[Record]:
    """Return records on the run's own data set, its splits and its corruptions.

    Results of earlier versions lack the mean over changes of color. Add it without an interval.
    """
    home, own = run.evaluated.get("data"), list(run.records)
    if home is not None:
        own = [r for r in own if f"{r.dataset} ".startswith((f"{home} ", f"{home}-C "))]
    each = [r for r in own if r.metric == "lipschitz" and not r.dataset.endswith(" train")]
    if each and all(record.task != "smoothness" for record in each):
        mean = sum(record.value for record in each) / len(each)
        own.append(replace(each[0], task="smoothness", value=mean, low=None, high=None))
    return own


def _column(
    spec: tuple[str, Sequence[str], str],
    runs: Sequence[RunFolder],
    labels: Labels,
    tested: Sequence[int],
    verdicts: ComparisonText | None,
) -> MetricColumn:
    """Return a metric with the verdict on it."""
    title, tasks, metric = spec
    key = _most_common_key(runs, tasks, metric)
    unit = _UNITS[metric] + _direction(metric)
    if not key:
        return MetricColumn(title, unit, "", NOT_TESTED if verdicts else "")
    task = key.partition("/")[0].replace("kNN ", "k = ").replace("few labels ", "")
    in_title = task in ("corruptions", "smoothness", "invariance", "information")
    note = unit if in_title else f"{task}, {unit}"
    if verdicts is None:
        return MetricColumn(title, note, key)
    return MetricColumn(title, note, key, *_metric_verdict(key, labels, tested, verdicts))


def _most_common_key(runs: Sequence[RunFolder], tasks: Sequence[str], metric: str) -> str:
    """Return the key that most runs have, of equals that of the first task; "" if there is none."""
    counts, rank = Counter[str](), dict[str, int]()
    for record in (r for run in runs for r in _own_records(run) if r.metric == metric):
        place = next((i for i, wanted in enumerate(tasks) if fnmatchcase(record.task, wanted)), -1)
        if place >= 0 and not record.dataset.endswith(" train"):
            counts[record.key] += 1
            rank[record.key] = place
    return max(counts, key=lambda key: (counts[key], -rank[key]), default="")


def _direction(metric: str) -> str:
    return "\N{NO-BREAK SPACE}\N{UPWARDS ARROW}" * (metric in HIGHER) + (
        "\N{NO-BREAK SPACE}\N{DOWNWARDS ARROW}" * (metric in LOWER)
    )


def _metric_verdict(
    key: str, labels: Labels, tested: Sequence[int], verdicts: ComparisonText
) -> tuple[str, int | None]:
    """Return the verdict on a metric in words, and the experiment that it supports."""
    verdict = verdicts.verdicts.get(key, ("", ""))[1]
    if not verdict or len(tested) != 2:
        return NOT_TESTED, None
    first, second = tested
    if verdict in ("better", "worse"):
        winner = second if verdict == "better" else first
        return f"{labels.experiments[winner].label} is better", winner
    if verdict in ("higher", "lower"):
        return f"{labels.experiments[second].label} is {verdict}", None
    return _VERDICTS.get(verdict, verdict), None


def _row(
    number: int, runs: Sequence[RunFolder], labels: Labels, columns: Sequence[MetricColumn]
) -> OverviewRow:
    mine = [runs[place] for place in labels.experiments[number].runs]
    notes = [f"{len(mine)} seeds"] if len(mine) > 1 else []
    notes += [f"{end}" for end in dict.fromkeys(map(failure, mine)) if end]
    cells = []
    for column in columns:
        found = [r for run in mine for r in _own_records(run) if r.key == column.key]
        cell = mean_cell(found) if found else None
        if cell is not None and len(found) < len(mine):
            cell = cell._replace(note=f"{cell.note} {len(found)} of {len(mine)} seeds".strip())
        cells.append(cell)
    return OverviewRow(number, ", ".join(notes), cells)


def mean_cell(records: Sequence[Record]) -> NumberCell:
    """Return the mean over seeds with its interval, or a single value with its own."""
    if len(records) == 1:
        return number_cell(records[0])
    values = [record.value for record in records]
    mean = sum(values) / len(values)
    interval = t_interval(mean, mean_part(values))
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    if records[0].metric in ACCURACIES and low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return number_cell(replace(records[0], value=mean, low=low, high=high))


def _title(runs: Sequence[RunFolder], labels: Labels) -> str:
    methods = list(dict.fromkeys(str(m) for run in runs if (m := run.settings.get("method"))))
    data = list(dict.fromkeys(name for run in runs if (name := data_name(run))))
    where = f" on {data[0]}" if len(data) == 1 else f" on {len(data)} data sets" if data else ""
    if not methods:
        names = [each.label for each in labels.experiments]
        return (" and ".join(names) if len(names) < 3 else f"{len(names)} encoders") + where
    if len(methods) == 1 and len(labels.experiments) > 1:
        return f"{len(labels.experiments)} variants of {method_name(methods[0])}{where}"
    names = [method_name(method) for method in methods]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return (listed if len(names) < 5 else f"{len(names)} methods") + where


def _facts(runs: Sequence[RunFolder], labels: Labels, today: date) -> str:
    """Return date, data set and number of runs."""
    parts = [f"{today.day} {today:%B %Y}"]
    sizes = dict.fromkeys(_data_facts(run) for run in runs if run.records)
    parts += [size for size in sizes if size][:3]
    count, kinds = len(runs), len(labels.experiments)
    words = f"{count} run" + "s" * (count > 1)
    parts.append(words if count == kinds else f"{words} of {kinds} experiment" + "s" * (kinds > 1))
    return " \N{MIDDLE DOT} ".join(parts)


def _data_facts(run: RunFolder) -> str:
    about = run.evaluated
    kind = "held-out" if about.get("held_out") else "test"
    names = ("train_images", "training images"), ("test_images", f"{kind} images")
    names = *names, ("classes", "classes")
    numbers = [
        f"{about[name]:,} {words}" for name, words in names if isinstance(about.get(name), int)
    ]
    data = data_name(run)
    return f"data set {data}: {', '.join(numbers)}" if data and numbers else data


def _sentence(
    labels: Labels,
    tested: Sequence[int],
    columns: Sequence[MetricColumn],
    rows: Sequence[OverviewRow],
    verdicts: ComparisonText | None,
) -> str:
    """Return the verdict in one sentence, or the main metric of a single experiment."""
    names = [labels.experiments[number].label for number in tested]
    if len(names) != 1:
        found = {} if verdicts is None else verdicts.verdicts
        main = {_lower(c.title): found[c.key][1] for c in columns if c.key in found}
        return verdict_sentence(names, verdicts, main)
    pairs = zip(columns, rows[tested[0]].cells, strict=True)
    for column, cell in pairs:
        if cell is not None:
            task, metric = column.key.partition("/")[0], column.key.rpartition("/")[2]
            value = f"{cell.text} {cell.note}".strip()
            return f"{names[0]} reaches {value} ({task} {metric}); nothing is compared with it."
    return f"{names[0]} is {NOT_TESTED} on the metrics of this table; all others are below."


def _lower(title: str) -> str:
    """Return a title as in a sentence; kNN and Brier keep their capital letters."""
    return title if title.startswith(("kNN", "Brier")) else title.lower()


def _note(
    runs: Sequence[RunFolder],
    labels: Labels,
    columns: Sequence[MetricColumn],
    verdicts: ComparisonText | None,
) -> str:
    """Return what the intervals are taken over, and which columns cannot be compared."""
    seeds = {len(each.runs) for each in labels.experiments}
    over = "test images" if seeds == {1} else "seeds, and over test images if there is one seed"
    notes = [
        f"In brackets: 95\N{NO-BREAK SPACE}% confidence intervals over {over}. "
        "\N{UPWARDS ARROW} higher is better, \N{DOWNWARDS ARROW} lower is better."
    ]
    if verdicts is not None and any(column.winner is not None for column in columns):
        notes.append("A check mark shows the better one after correction for all comparisons.")
    differ = [
        column.title
        for column in columns
        if len({r.image_set for run in runs for r in run.records if r.key == column.key}) > 1
    ]
    if differ:
        notes.append(f"Not measured on the same images in all runs: {', '.join(differ)}.")
    return " ".join(notes)
