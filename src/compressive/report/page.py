"""The report page: collect the content of each section that has data, and render it."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from compressive.config import flat
from compressive.report import gallery, tables
from compressive.report.ablation import studies
from compressive.report.svg import COLORS, Drawing, Line, Point, chart, thinned
from compressive.rundir.files import local_path, write_bytes
from compressive.rundir.lock import ensure_writable
from compressive.rundir.reader import RunFolder, read_runs
from compressive.rundir.records import ComparisonText, Record

_TRAINING_CURVES = {  # key in metrics.jsonl: title, axis label
    "loss": ("Loss", "loss"),
    "nll": ("Loss without the compression term", "nll (nats)"),
    "effective_beta": ("Adaptive beta, mean over images", "beta of an image"),
    "effective_beta_p10": ("Adaptive beta, 10 % of images are below", "beta of an image"),
    "effective_beta_p50": ("Adaptive beta, median over images", "beta of an image"),
    "effective_beta_p90": ("Adaptive beta, 90 % of images are below", "beta of an image"),
    "lr": ("Learning rate", "learning rate"),
    "images_per_second": ("Speed", "images per second"),
    "probe_accuracy": ("Linear probe, held-out images", "accuracy"),
    "knn_accuracy": ("Nearest neighbors, held-out images", "accuracy"),
}
_MIN_BIN_SHARE = 0.001  # smaller bins of a reliability diagram are left out


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    held_out: bool = False,
    verdicts: ComparisonText | None = None,
) -> Path:
    """Write one self-contained HTML file about these runs and return its path.

    With `held_out` show results on held-out images even if there are others. `verdicts` comes from
    `evaluation.tables`, which needs torch.
    """
    from jinja2 import Environment, StrictUndefined

    out = local_path(out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, such as {out}/report.html")
    ensure_writable(out.parent)
    content = _page_content(read_runs(runs, held_out=held_out)) | {"verdicts": verdicts}
    source = files("compressive.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = environment.from_string(source).render(content)
    write_bytes(out, text.encode(errors="replace"))
    return out


def _page_content(runs: Sequence[RunFolder]) -> dict[str, Any]:
    origins = [_facts_of(run) for run in runs]
    shared = _common_facts(origins)
    return {
        "runs": runs,
        "colors": COLORS,
        "summaries": [_run_summary(run) for run in runs],
        "curves": _curves(runs),
        "plane": _plane(runs),
        "views": gallery.views(runs),
        "neighbors": gallery.neighbors(runs),
        "maps": gallery.maps(runs),
        "tables": tables.record_tables(runs),
        "terms": tables.metric_descriptions(runs),
        "reliability": _reliability(runs),
        "heat": tables.corruption_tables(runs),
        "corruptions": tables.corruption_notes(runs),
        "smoothness": _smoothness(runs),
        "studies": studies(runs),
        "paper": tables.paper_rows(runs),
        "differences": tables.setting_differences(runs),
        "judged": [place for place, run in enumerate(runs) if run.records],
        "shared": shared,
        "origins": [[fact for fact in facts if fact not in shared] for facts in origins],
        "settings": [json.dumps(run.settings, indent=1, ensure_ascii=False) for run in runs],
    }


def _run_summary(run: RunFolder) -> str:
    settings, steps, loss = run.settings, run.series(), run.last("loss")
    words = [
        " on ".join(str(settings[k]) for k in ("method", "data.source") if k in settings),
        f"{int(steps[-1][0]):,} steps" if steps else "",
        "" if loss is None else f"last loss {tables.format_digits(loss)}",
    ]
    if (best := tables.headline(run, "top-1")) is not None:
        cell = tables.number_cell(best)
        words.append(f"{best.task} top-1 {cell.text} {cell.note}")
    return ", ".join(word.strip() for word in words if word) or "nothing measured yet"


def _drawing(
    title: str, lines: Sequence[Line], x: str, y: str, numbers: Sequence[Any] = (), **how: Any
) -> Drawing:
    return Drawing(title, chart(lines, x, y, **how), numbers, [line.run for line in lines])


def _run_lines(runs: Sequence[RunFolder], x: str, y: str) -> list[Line]:
    """Return a line for each run whose metrics have both keys."""
    lines = []
    is_speed = y == "images_per_second"
    for place, run in enumerate(runs):
        rows = run.series(*(key for key in (x, y) if key != "step"))
        if is_speed:
            rows = [row for row in rows if row[-1] > 0]  # the first line has no throughput yet
        if rows:
            points = [(row[0] if x == "step" else row[1], row[-1]) for row in rows]
            # Median: throughput jumps while another run on the same device pauses.
            points = thinned(points, np.median if is_speed else np.mean)
            lines.append(Line(points, place, run.name))
    return lines


def _curves(runs: Sequence[RunFolder]) -> list[Drawing]:
    return [
        _drawing(title, lines, "step", axis, clip=True, zero=key == "images_per_second")
        for key, (title, axis) in _TRAINING_CURVES.items()
        if (lines := _run_lines(runs, "step", key))
    ]


def _plane(runs: Sequence[RunFolder]) -> list[Drawing]:
    titles = {"reducible_residual": "Reducible part", "residual": "Residual, floor and all"}
    return [
        _drawing(title, lines, f"{key} (nats)", "predictive (nats)", ends=True, clip=True)
        for key, title in titles.items()
        if (lines := _run_lines(runs, key, "predictive"))
    ]


def _grouped(
    runs: Sequence[RunFolder], wanted: Callable[[Record], bool]
) -> dict[tuple[str, str], list[tuple[int, Record]]]:
    """Return position and record of all runs, by task and dataset."""
    found: dict[tuple[str, str], list[tuple[int, Record]]] = {}
    for place, run in enumerate(runs):
        for record in filter(wanted, run.records):
            found.setdefault((record.task, record.dataset), []).append((place, record))
    return found


def _reliability(runs: Sequence[RunFolder]) -> list[Drawing]:
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
                lines.append(Line(points, place, runs[place].name, weights=shares))
                errors.append((place, tables.number_cell(record)))
        if lines:
            title, axes = f"{task}, {dataset}", ("confidence", "accuracy")
            drawings.append(_drawing(title, lines, *axes, square=True, numbers=errors))
    return drawings


def _smoothness(runs: Sequence[RunFolder]) -> dict[str, list[Drawing]]:
    """Return a drawing for each perturbation, by dataset."""
    drawings: dict[str, list[Drawing]] = {}
    for (task, dataset), found in _grouped(runs, lambda f: "histogram" in f.protocol).items():
        shapes = [
            (place, record, points)
            for place, record in found
            if (points := _histogram_outline(record.protocol["histogram"]))
        ]
        end = max((_end_of_most(points) for _, _, points in shapes), default=0.0)
        lines = [
            Line([p for p in points if p[0] <= end], place, runs[place].name, mark=record.value)
            for place, record, points in shapes
        ]
        means = [(place, tables.number_cell(record)) for place, record, _ in shapes]
        if lines:
            title, axes = task.removeprefix("smoothness "), ("local Lipschitz estimate", "density")
            drawing = _drawing(title, lines, *axes, zero=True, numbers=means)
            drawings.setdefault(dataset, []).append(drawing)
    return drawings


def _histogram_outline(shape: object) -> list[Point]:
    """Return the outline of a histogram."""
    shape = shape if isinstance(shape, dict) else {}
    edges, density = (tables.finite_numbers(shape.get(key)) for key in ("edges", "density"))
    if not density or len(edges) != len(density) + 1:
        return []
    sides = zip(pairwise(edges), density, strict=True)
    return [(edge, height) for ends, height in sides for edge in ends]


def _end_of_most(points: Sequence[Point], share: float = 0.99) -> float:
    """Return the bin edge below which this share of a histogram lies."""
    bars = list(zip(points[::2], points[1::2], strict=True))
    areas = [(right - left) * height for (left, height), (right, _) in bars]
    wanted = share * sum(areas) * (1 - 1e-9)
    sums = zip(accumulate(areas), bars, strict=True)
    return next((bar[1][0] for area, bar in sums if area >= wanted), points[-1][0])


def _facts_of(run: RunFolder) -> list[tuple[str, str]]:
    """Return how, where and with which versions a run and its records were made."""
    about = {"folder": str(run.path), **flat(run.about)}
    judged = {f"evaluation: {key}": value for key, value in flat(run.evaluated).items()}
    commands = dict.fromkeys(record.command for record in run.records if record.command)
    return [
        *((k.removeprefix("versions."), str(v)) for k, v in (about | judged).items() if v != ""),
        *(("evaluation: command", command) for command in commands),
    ]


def _common_facts(origins: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return facts that are equal in all runs that have them, and that several runs have."""
    values: dict[str, list[str]] = {}
    for key, value in (fact for facts in origins for fact in facts):
        values.setdefault(key, []).append(value)
    return [(key, all_[0]) for key, all_ in values.items() if len(all_) > len(set(all_)) == 1]
