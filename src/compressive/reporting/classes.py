"""Accuracy per class, confusions, disagreements and errors, from stored predictions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from compressive.reporting.gallery import png
from compressive.reporting.labels import Labels
from compressive.reporting.tables import NumberCell, ReportRow, ReportTable, finite_numbers
from compressive.reporting.verdict import TOO_FEW
from compressive.rundir.intervals import mean_part, t_interval, wilson_interval
from compressive.rundir.predictions_file import PREDICTED_TASKS, Predictions
from compressive.rundir.reader import RunFolder

_FEW_OF_A_CLASS = 20  # of a class; as in `evaluation.compare`
_MATRIX_CLASSES = 25  # with more, list the most frequent confusions instead
_MOST_CONFUSIONS = 15
_TILES = 12
_MOST_PAIRS = 3  # of experiments whose disagreements are shown
_MOST_MATRICES = 6


class ClassTable(NamedTuple):
    """Accuracy per class, the lowest of the first experiment first."""

    title: str
    experiments: Sequence[int]
    rows: Sequence[ReportRow]
    note: str = ""  # of all rows, if it is the same


class Tile(NamedTuple):
    """An image with its class and a prediction."""

    image: str
    name: str
    note: str


class TileGroup(NamedTuple):
    """Images under a title."""

    title: str
    note: str
    tiles: Sequence[Tile]


class ClassReport(NamedTuple):
    """All parts that need predictions; each is empty if there are none."""

    task: str
    accuracy: ClassTable | None
    confusions: Sequence[tuple[int, ReportTable]]  # experiment and its matrix or list
    is_matrix: bool
    disagreements: Sequence[TileGroup]
    errors: Sequence[TileGroup]
    missing: Sequence[str]  # experiments that were evaluated but have no predictions


def class_report(runs: Sequence[RunFolder], labels: Labels) -> ClassReport:
    """Return the parts for the classifier that most runs have predictions of."""
    counts = {task: sum(task in run.predictions for run in runs) for task in PREDICTED_TASKS}
    task = max(counts, key=lambda name: counts[name])
    found = _by_experiment(runs, labels, task)
    if not counts[task]:
        return ClassReport("", _old_accuracy(runs, labels), [], False, [], [], [])
    classes = next(iter(found.values()))[0].classes
    tested = [n for n, e in enumerate(labels.experiments) if any(runs[i].records for i in e.runs)]
    shown = list(islice(found.items(), _MOST_MATRICES))
    is_matrix = len(classes) <= _MATRIX_CLASSES
    table = _matrix if is_matrix else _confusion_list
    return ClassReport(
        task,
        _accuracy(task, found, classes),
        [(number, table(each, classes)) for number, each in shown],
        is_matrix,
        _disagreements(found, labels),
        [_confident_errors(number, each[0], labels) for number, each in shown],
        [labels.experiments[number].label for number in tested if number not in found],
    )


def _by_experiment(
    runs: Sequence[RunFolder], labels: Labels, task: str
) -> dict[int, list[Predictions]]:
    """Return predictions of each experiment on the images that most runs have."""
    all_ = [run.predictions[task] for run in runs if task in run.predictions]
    if not all_:
        return {}
    most, _ = Counter((each.dataset, each.images) for each in all_).most_common(1)[0]
    found: dict[int, list[Predictions]] = {}
    for number, experiment in enumerate(labels.experiments):
        for run in (runs[place] for place in experiment.runs):
            each = run.predictions.get(task)
            if each is not None and (each.dataset, each.images) == most:
                found.setdefault(number, []).append(each)
    return found


def _accuracy(
    task: str, found: Mapping[int, Sequence[Predictions]], classes: Sequence[str]
) -> ClassTable:
    first = next(iter(found.values()))[0]
    counts = np.bincount(first.label[first.label >= 0], minlength=len(classes))
    rows = []
    for c in np.flatnonzero(counts).tolist():
        n = int(counts[c])
        shares = [
            [float((one.predicted[one.label == c] == c).mean()) for one in each]
            for each in found.values()
        ]
        few = n < _FEW_OF_A_CLASS
        note = f"{n:,} image" + "s" * (n > 1) + f": {TOO_FEW}" * few
        cells = [_share_cell(values, n, with_interval=not few) for values in shares]
        rows.append(ReportRow(classes[c], note, cells))
    rows.sort(key=lambda row: row.cells[0].value if row.cells[0] else 0.0)
    notes = {row.note for row in rows}
    note = notes.pop() if len(notes) == 1 else ""
    title = f"Accuracy of the {task} classifier on {first.dataset}"
    return ClassTable(title, list(found), rows, note)


def _share_cell(values: Sequence[float], n: int, *, with_interval: bool) -> NumberCell:
    """Return an accuracy with its interval over seeds, or over images for one seed."""
    mean = float(np.mean(values))
    if len(values) == 1:
        ends = wilson_interval(mean, n)
    else:
        interval = t_interval(mean, mean_part(values))
        ends = (interval.low, interval.high) if interval else None
    note = ""
    if ends is not None and with_interval:
        low, high = max(0.0, ends[0]), min(1.0, ends[1])
        note = f"[{100 * low:.0f},\N{NO-BREAK SPACE}{100 * high:.0f}]"
    return NumberCell(f"{100 * mean:.1f}\N{NO-BREAK SPACE}%", mean, note, mean)


def _old_accuracy(runs: Sequence[RunFolder], labels: Labels) -> ClassTable | None:
    """Return accuracies per class of results without predictions; they have no intervals."""
    by_place: dict[int, dict[str, float]] = {}
    for number, experiment in enumerate(labels.experiments):
        for run in (runs[place] for place in experiment.runs):
            for record in run.records:
                each = record.protocol.get("per_class")
                if record.metric != "mean per class" or record.task not in PREDICTED_TASKS:
                    continue
                if isinstance(each, dict) and finite_numbers([*each.values()]):
                    by_place.setdefault(number, each)
    if not by_place:
        return None
    names = dict.fromkeys(name for each in by_place.values() for name in each)
    rows = []
    for name in names:
        values = [each.get(name) for each in by_place.values()]
        cells = [
            None if v is None else NumberCell(f"{100 * v:.1f}\N{NO-BREAK SPACE}%", v, "", v)
            for v in values
        ]
        rows.append(ReportRow(name, "", cells))
    rows.sort(key=lambda row: row.cells[0].value if row.cells[0] else 0.0)
    return ClassTable("Accuracy of the classifier", list(by_place), rows)


def _counts(found: Sequence[Predictions], classes: int) -> np.ndarray:
    """Return how often each class was predicted for each class, summed over seeds."""
    counts = np.zeros((classes, classes), np.int64)
    for each in found:
        known = each.label >= 0
        np.add.at(counts, (each.label[known], each.predicted[known]), 1)
    return counts


def _matrix(found: Sequence[Predictions], classes: Sequence[str]) -> ReportTable:
    counts = _counts(found, len(classes))
    rows = []
    for name, row in zip(classes, counts, strict=True):
        if not row.sum():
            continue
        shares = (row / row.sum()).tolist()
        cells = [NumberCell(f"{100 * v:.0f}" if v >= 0.01 else "", v, "", v) for v in shares]
        rows.append(ReportRow(name, "", cells))
    return ReportTable("", rows, heads=list(classes))


def _confusion_list(found: Sequence[Predictions], classes: Sequence[str]) -> ReportTable:
    """Return the pairs of classes that are confused most often, as a share of the correct one."""
    counts = _counts(found, len(classes))
    totals = counts.sum(1)
    np.fill_diagonal(counts, 0)
    rows = []
    for place in np.argsort(counts, axis=None, kind="stable")[::-1][:_MOST_CONFUSIONS]:
        of, predicted = divmod(int(place), len(classes))
        if not counts[of, predicted]:
            break
        share = float(counts[of, predicted] / totals[of])
        text = f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
        name = f"{classes[of]} \N{RIGHTWARDS ARROW} {classes[predicted]}"
        note = f"{counts[of, predicted] // len(found):,} of {totals[of] // len(found):,} images"
        rows.append(ReportRow(name, note, [NumberCell(text, share, "", share)]))
    return ReportTable("", rows, heads=["share"])


def _disagreements(found: Mapping[int, Sequence[Predictions]], labels: Labels) -> list[TileGroup]:
    """Return images that one encoder gets right and the other one wrong, both ways."""
    if len(found) < 2:
        return []
    first, *others = found
    groups = []
    for other in others[:_MOST_PAIRS]:
        for right, wrong in ((other, first), (first, other)):
            groups.append(_disagreement(right, found[right][0], wrong, found[wrong][0], labels))
    return groups


def _disagreement(
    right: int, correct: Predictions, wrong: int, mistaken: Predictions, labels: Labels
) -> TileGroup:
    hit = correct.predicted == correct.label
    both = hit & (mistaken.predicted != mistaken.label) & (mistaken.label >= 0)
    shown = [place for place, at in enumerate(mistaken.error) if hit[at]][:_TILES]
    a, b = (labels.experiments[number].label for number in (right, wrong))
    note = f"{int(both.sum()):,} of {len(both):,} images."
    if both.any() and not shown:
        note += f" None of them is among the {len(mistaken.error)} most confident errors of {b}."
    return TileGroup(
        f"Right with {a}, wrong with {b}", note, [_error_tile(mistaken, place) for place in shown]
    )


def _confident_errors(number: int, found: Predictions, labels: Labels) -> TileGroup:
    errors = int(((found.predicted != found.label) & (found.label >= 0)).sum())
    shown = range(min(_TILES, len(found.error)))
    note = f"{errors:,} of {len(found.label):,} images are wrong."
    return TileGroup(
        labels.experiments[number].label, note, [_error_tile(found, place) for place in shown]
    )


def _error_tile(found: Predictions, place: int) -> Tile:
    at = int(found.error[place])
    label, predicted = (found.classes[int(each[at])] for each in (found.label, found.predicted))
    percent = f"{100 * found.confidence[at]:.0f}\N{NO-BREAK SPACE}%"
    return Tile(png(found.error_image[place]), label, f"predicted {predicted}, {percent}")
