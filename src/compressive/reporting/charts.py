"""Charts of the report: training, the information plane, calibration and smoothness."""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from compressive.reporting import tables
from compressive.reporting.labels import Labels, method_name
from compressive.reporting.svg import Drawing, Line, Point, chart, thinned
from compressive.rundir.reader import RunFolder
from compressive.rundir.records import Record

_TRAINING_CURVES = {  # key in metrics.jsonl: title, axis label
    "probe_accuracy": ("Linear probe, held-out images", "accuracy"),
    "knn_accuracy": ("Nearest neighbors, held-out images", "accuracy"),
    "loss": ("Loss", "loss"),
    "nll": ("Loss without the compression term", "nll (nats)"),
    "effective_beta": ("Adaptive beta, mean over images", "beta of an image"),
    "effective_beta_p10": ("Adaptive beta, 10 % of images are below", "beta of an image"),
    "effective_beta_p50": ("Adaptive beta, median over images", "beta of an image"),
    "effective_beta_p90": ("Adaptive beta, 90 % of images are below", "beta of an image"),
    "lr": ("Learning rate", "learning rate"),
    "images_per_second": ("Speed", "images per second"),
}
_LOSSES = ("loss", "nll")  # comparable only between runs that minimize the same function
_OF_LOSS = ("method", "bottleneck.", "decoder.", "target.", "data.source", "train.batch_size")
_MANY_IMAGES, _JOINED_BINS = 5000, 4  # of a histogram, which has 100 equal bins
_MIN_BIN_SHARE = 0.001  # smaller bins of a reliability diagram are left out


def training_curves(runs: Sequence[RunFolder], labels: Labels) -> list[Drawing]:
    """Return a chart per metric; losses that cannot be compared get charts of their own."""
    drawings = []
    for key, (title, axis) in _TRAINING_CURVES.items():
        groups = _same_loss(runs) if key in _LOSSES else [list(range(len(runs)))]
        for places in groups:
            of = f", {_group_name(runs, labels, places)}" if len(groups) > 1 else ""
            if lines := _run_lines(runs, labels, "step", key, places):
                zero = key == "images_per_second"
                drawings.append(_drawing(title + of, lines, "step", axis, clip=True, zero=zero))
    return drawings


def _same_loss(runs: Sequence[RunFolder]) -> list[list[int]]:
    """Return positions of runs that minimize the same function, in groups."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        kept = {k: v for k, v in sorted(run.settings.items()) if k.startswith(_OF_LOSS)}
        groups.setdefault(json.dumps(kept) if kept else run.name, []).append(place)
    return list(groups.values())


def _group_name(runs: Sequence[RunFolder], labels: Labels, places: Sequence[int]) -> str:
    experiments = dict.fromkeys(labels.of[place] for place in places)
    names = [labels.experiments[number].label for number in experiments]
    method = runs[places[0]].settings.get("method", "")
    return " and ".join(names) if len(names) < 3 else f"{len(names)} of {method_name(method)}"


def information_plane(runs: Sequence[RunFolder], labels: Labels) -> list[Drawing]:
    """Return predictive information over the residual during training."""
    titles = {"reducible_residual": "Reducible part", "residual": "Whole residual"}
    every = range(len(runs))
    return [
        _drawing(title, lines, f"{key} (nats)", "predictive (nats)", ends=True, clip=True)
        for key, title in titles.items()
        if (lines := _run_lines(runs, labels, key, "predictive", every))
    ]


def reliability_diagrams(runs: Sequence[RunFolder], labels: Labels) -> list[Drawing]:
    """Return accuracy over confidence for each classifier and data set."""
    drawings = []
    for (task, dataset), found in _grouped(runs, lambda f: f.metric == "ece").items():
        lines, errors = [], []
        for place, record in found:
            rows = record.protocol.get("reliability")
            bins = [tables.finite_numbers(row) for row in (rows if isinstance(rows, list) else [])]
            bins = [row for row in bins if len(row) == 3 and row[2] > 0]
            images = sum(row[2] for row in bins)
            if bins := [row for row in bins if row[2] >= _MIN_BIN_SHARE * images]:
                points, shares = [(row[0], row[1]) for row in bins], [r[2] / images for r in bins]
                lines.append(Line(points, labels.of[place], labels.names[place], weights=shares))
                errors.append((labels.of[place], tables.number_cell(record)))
        if lines:
            title, axes = f"{task}, {dataset}", ("confidence", "accuracy")
            drawings.append(_drawing(title, lines, *axes, square=True, numbers=errors))
    return drawings


def smoothness_histograms(runs: Sequence[RunFolder], labels: Labels) -> dict[str, list[Drawing]]:
    """Return a histogram for each change of color, by dataset."""
    drawings: dict[str, list[Drawing]] = {}
    for (task, dataset), found in _grouped(runs, lambda f: "histogram" in f.protocol).items():
        shapes = [
            (place, record, points)
            for place, record in found
            if (points := _histogram_outline(record.protocol["histogram"], record.n))
        ]
        end = max((_end_of_most(points) for _, _, points in shapes), default=0.0)
        lines = [
            Line(
                [p for p in points if p[0] <= end],
                labels.of[place],
                labels.names[place],
                mark=record.value,
            )
            for place, record, points in shapes
        ]
        means = [(labels.of[place], tables.number_cell(record)) for place, record, _ in shapes]
        if lines:
            title, axes = task.removeprefix("smoothness "), ("local Lipschitz estimate", "density")
            drawing = _drawing(title, lines, *axes, zero=True, numbers=means)
            drawings.setdefault(dataset, []).append(drawing)
    # Test images first.
    return dict(sorted(drawings.items(), key=lambda item: item[0].endswith(" train")))


def _drawing(
    title: str, lines: Sequence[Line], x: str, y: str, numbers: Sequence[Any] = (), **how: Any
) -> Drawing:
    return Drawing(title, chart(lines, x, y, **how), numbers, [line.style for line in lines])


def _run_lines(
    runs: Sequence[RunFolder], labels: Labels, x: str, y: str, places: Sequence[int]
) -> list[Line]:
    """Return a line for each of these runs whose metrics have both keys."""
    lines = []
    is_speed = y == "images_per_second"
    for place in places:
        rows = runs[place].series(*(key for key in (x, y) if key != "step"))
        if is_speed:
            rows = [row for row in rows if row[-1] > 0]  # the first line has no throughput yet
        if rows:
            points = [(row[0] if x == "step" else row[1], row[-1]) for row in rows]
            # Median: throughput jumps while another run on the same device pauses.
            points = thinned(points, np.median if is_speed else np.mean)
            lines.append(Line(points, labels.of[place], labels.names[place]))
    return lines


def _grouped(
    runs: Sequence[RunFolder], wanted: Callable[[Record], bool]
) -> dict[tuple[str, str], list[tuple[int, Record]]]:
    """Return position and record of all runs, by task and dataset."""
    found: dict[tuple[str, str], list[tuple[int, Record]]] = {}
    for place, run in enumerate(runs):
        for record in filter(wanted, run.records):
            found.setdefault((record.task, record.dataset), []).append((place, record))
    return found


def _histogram_outline(shape: object, images: int) -> list[Point]:
    """Return the outline of a histogram; with few images, join bins to reduce noise."""
    shape = shape if isinstance(shape, dict) else {}
    edges, density = (tables.finite_numbers(shape.get(key)) for key in ("edges", "density"))
    if not density or len(edges) != len(density) + 1:
        return []
    if images < _MANY_IMAGES and len(density) % _JOINED_BINS == 0:
        edges = edges[::_JOINED_BINS]
        density = np.reshape(density, (-1, _JOINED_BINS)).mean(1).tolist()
    sides = zip(pairwise(edges), density, strict=True)
    return [(edge, height) for ends, height in sides for edge in ends]


def _end_of_most(points: Sequence[Point], share: float = 0.99) -> float:
    """Return the bin edge below which this share of a histogram lies."""
    bars = list(zip(points[::2], points[1::2], strict=True))
    areas = [(right - left) * height for (left, height), (right, _) in bars]
    wanted = share * sum(areas) * (1 - 1e-9)
    sums = zip(accumulate(areas), bars, strict=True)
    return next((bar[1][0] for area, bar in sums if area >= wanted), points[-1][0])
