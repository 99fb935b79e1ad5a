"""The page: which sections there is data for, and what stands in each."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from compressive.report import gallery
from compressive.report.ablation import studies
from compressive.report.svg import COLORS, Line, Picture, Point, chart, thinned
from compressive.report.tables import (
    Verdicts,
    beside_paper,
    cell,
    corruptions,
    differences,
    digits,
    headline,
    heat,
    numbers,
    tables,
    terms,
)
from compressive.rundir.files import write_bytes
from compressive.rundir.lock import ensure_writable
from compressive.rundir.reader import Figure, Run, flat, read_runs

_CURVES = {  # key of a journal line: title, words at the axis
    "loss": ("Loss", "loss"),
    "nll": ("Loss without the price of information", "nll (nats)"),
    "lr": ("Learning rate", "learning rate"),
    "images_per_second": ("Speed", "images per second"),
    "probe_accuracy": ("Linear probe, held-out images", "accuracy"),
    "knn_accuracy": ("Nearest neighbors, held-out images", "accuracy"),
}
_FEW = 0.001  # share of the images below which the accuracy of a bin is chance


def write_report(
    runs: Sequence[Path], out: Path, *, held_out: bool = False, verdicts: Verdicts | None = None
) -> Path:
    """Write one HTML file that shows these runs and needs nothing else; its path.

    held_out: with their results on held-out images, where there are others as well. verdicts: of
    `evaluation.tables`, which needs torch.
    """
    from jinja2 import Environment, StrictUndefined

    out = Path(out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, such as {out}/report.html")
    ensure_writable(out.parent)
    content = _content(read_runs(runs, held_out=held_out)) | {"verdicts": verdicts}
    source = files("compressive.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    room = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = room.from_string(source).render(content)
    write_bytes(out, text.encode(errors="replace"))
    return out


def _content(runs: Sequence[Run]) -> dict[str, Any]:
    origins = [_origin(run) for run in runs]
    shared = _shared(origins)
    return {
        "runs": runs,
        "colors": COLORS,
        "summaries": [_summary(run) for run in runs],
        "curves": _curves(runs),
        "plane": _plane(runs),
        "views": gallery.views(runs),
        "neighbors": gallery.neighbors(runs),
        "maps": gallery.maps(runs),
        "tables": tables(runs),
        "terms": terms(runs),
        "reliability": _reliability(runs),
        "heat": heat(runs),
        "corruptions": corruptions(runs),
        "smoothness": _smoothness(runs),
        "studies": studies(runs),
        "paper": beside_paper(runs),
        "differences": differences(runs),
        "judged": [place for place, run in enumerate(runs) if run.figures],
        "shared": shared,
        "origins": [[fact for fact in facts if fact not in shared] for facts in origins],
        "settings": [json.dumps(run.settings, indent=1, ensure_ascii=False) for run in runs],
    }


def _summary(run: Run) -> str:
    settings = run.settings
    words = [" on ".join(str(settings[k]) for k in ("method", "data.source") if k in settings)]
    steps = run.series()
    words.append(f"{int(steps[-1][0]):,} steps" if steps else "")
    loss = run.last("loss")
    words.append("" if loss is None else f"last loss {digits(loss)}")
    best = headline(run, "top-1")
    words.append(f"{best.task} top-1 {cell(best).text} {cell(best).note}" if best else "")
    return ", ".join(word.strip() for word in words if word) or "nothing measured yet"


def _picture(
    title: str, lines: Sequence[Line], x: str, y: str, numbers: Sequence[Any] = (), **how: Any
) -> Picture:
    return Picture(title, chart(lines, x, y, **how), numbers, [line.run for line in lines])


def _lines(runs: Sequence[Run], x: str, y: str) -> list[Line]:
    """A line for each run that has both along its training; "step" is always there."""
    lines = []
    is_speed = y == "images_per_second"
    for place, run in enumerate(runs):
        rows = run.series(*(key for key in (x, y) if key != "step"))
        if is_speed:
            rows = [row for row in rows if row[-1] > 0]  # the first line has had no time yet
        if rows:
            points = [(row[0] if x == "step" else row[1], row[-1]) for row in rows]
            # A speed jumps while another run on the same device rests.
            points = thinned(points, np.median if is_speed else np.mean)
            lines.append(Line(points, place, run.name))
    return lines


def _curves(runs: Sequence[Run]) -> list[Picture]:
    return [
        _picture(title, lines, "step", axis, clip=True, zero=key == "images_per_second")
        for key, (title, axis) in _CURVES.items()
        if (lines := _lines(runs, "step", key))
    ]


def _plane(runs: Sequence[Run]) -> list[Picture]:
    pictures = []
    for key, title in (
        ("reducible_residual", "Reducible part"),
        ("residual", "Residual, floor and all"),
    ):
        if lines := _lines(runs, key, "predictive"):
            axes = (f"{key} (nats)", "predictive (nats)")
            pictures.append(_picture(title, lines, *axes, ends=True, clip=True))
    return pictures


def _grouped(
    runs: Sequence[Run], wanted: Callable[[Figure], bool]
) -> dict[tuple[str, str], list[tuple[int, Figure]]]:
    """Figures of all runs by task and dataset."""
    found: dict[tuple[str, str], list[tuple[int, Figure]]] = {}
    for place, run in enumerate(runs):
        for figure in filter(wanted, run.figures):
            found.setdefault((figure.task, figure.dataset), []).append((place, figure))
    return found


def _reliability(runs: Sequence[Run]) -> list[Picture]:
    pictures = []
    for (task, dataset), found in _grouped(runs, lambda f: f.metric == "ece").items():
        lines, errors = [], []
        for place, figure in found:
            bins = [numbers(row) for row in _rows(figure.protocol.get("reliability"))]
            bins = [row for row in bins if len(row) == 3 and row[2] > 0]
            images = sum(row[2] for row in bins)
            if bins := [row for row in bins if row[2] >= _FEW * images]:
                points, shares = [(row[0], row[1]) for row in bins], [r[2] / images for r in bins]
                lines.append(Line(points, place, runs[place].name, weights=shares))
                errors.append((place, cell(figure)))
        if lines:
            title, axes = f"{task}, {dataset}", ("confidence", "accuracy")
            pictures.append(_picture(title, lines, *axes, square=True, numbers=errors))
    return pictures


def _smoothness(runs: Sequence[Run]) -> dict[str, list[Picture]]:
    """A drawing for each change of the images, by the set they are of."""
    pictures: dict[str, list[Picture]] = {}
    for (task, dataset), found in _grouped(runs, lambda f: "histogram" in f.protocol).items():
        shapes = [(place, figure, _steps(figure.protocol["histogram"])) for place, figure in found]
        shapes = [(place, figure, points) for place, figure, points in shapes if points]
        end = max((_end_of_most(points) for _, _, points in shapes), default=0.0)
        lines = [
            Line([p for p in points if p[0] <= end], place, runs[place].name, mark=figure.value)
            for place, figure, points in shapes
        ]
        means = [(place, cell(figure)) for place, figure, _ in shapes]
        if lines:
            title, axes = task.removeprefix("smoothness "), ("local Lipschitz estimate", "density")
            drawing = _picture(title, lines, *axes, zero=True, numbers=means)
            pictures.setdefault(dataset, []).append(drawing)
    return pictures


def _steps(shape: object) -> list[Point]:
    """A histogram as a line that goes along its bars."""
    shape = shape if isinstance(shape, dict) else {}
    edges, density = numbers(shape.get("edges")), numbers(shape.get("density"))
    if not density or len(edges) != len(density) + 1:
        return []
    sides = zip(pairwise(edges), density, strict=True)
    return [(edge, height) for ends, height in sides for edge in ends]


def _end_of_most(points: Sequence[Point], share: float = 0.99) -> float:
    """The edge that leaves this share of a histogram to its left."""
    bars = list(zip(points[::2], points[1::2], strict=True))
    areas = [(right - left) * height for (left, height), (right, _) in bars]
    wanted = share * sum(areas) * (1 - 1e-9)
    sums = zip(accumulate(areas), bars, strict=True)
    return next((bar[1][0] for area, bar in sums if area >= wanted), points[-1][0])


def _origin(run: Run) -> list[tuple[str, str]]:
    """How, where and by what a run and its figures were made."""
    about = {"folder": str(run.path), **flat(run.about)}
    judged = {f"evaluation: {key}": value for key, value in flat(run.evaluated).items()}
    commands = dict.fromkeys(figure.command for figure in run.figures if figure.command)
    return [
        *((k.removeprefix("versions."), str(v)) for k, v in (about | judged).items() if v != ""),
        *(("evaluation: command", command) for command in commands),
    ]


def _shared(origins: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What is the same in all runs that have it, and in more than one."""
    values: dict[str, list[str]] = {}
    for key, value in (fact for facts in origins for fact in facts):
        values.setdefault(key, []).append(value)
    return [(key, all_[0]) for key, all_ in values.items() if len(all_) > len(set(all_)) == 1]


def _rows(values: object) -> list[object]:
    return values if isinstance(values, list) else []
