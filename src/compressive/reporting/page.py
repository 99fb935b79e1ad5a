"""The report page: collect the content of each section that has data, and render it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressive.config import flat
from compressive.reporting import charts, gallery, tables
from compressive.reporting.ablation import studies
from compressive.reporting.classes import class_report
from compressive.reporting.labels import label_runs, method_name
from compressive.reporting.overview import data_name, main_metric, overview
from compressive.reporting.shareable import shareable, shareable_text
from compressive.reporting.svg import COLORS, dash
from compressive.rundir.files import local_path, write_bytes
from compressive.rundir.lock import ensure_writable
from compressive.rundir.reader import RunFolder, read_runs
from compressive.rundir.records import ComparisonText

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    held_out: bool = False,
    verdicts: ComparisonText | None = None,
) -> Path:
    """Write one self-contained HTML file about these runs and return its path.

    With `held_out` show results on held-out images even if there are others. `verdicts` comes from
    `evaluation.comparison_table`. The page has no absolute paths, so that it can be shared.
    """
    out = local_path(out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, such as {out}/report.html")
    ensure_writable(out.parent)
    found = [shareable(run) for run in read_runs(runs, held_out=held_out)]
    text = page_template("compressive.reporting").render(
        _page_content(found, shareable_text(verdicts))
    )
    write_bytes(out, text.encode(errors="replace"))
    return out


@cache
def page_template(package: str, name: str = "page.html.jinja") -> "Template":
    """Compile a page of a package once, which takes longer than rendering it."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files(package).joinpath(name).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    style = files("compressive.reporting").joinpath("style.css").read_text(encoding="utf-8")
    environment.globals["style"] = Markup(style.rstrip())
    return environment.from_string(source)


def _page_content(runs: Sequence[RunFolder], verdicts: ComparisonText | None) -> dict[str, Any]:
    labels, folders = label_runs(runs), [run.name for run in runs]
    runs = [replace(run, name=name) for run, name in zip(runs, labels.names, strict=True)]
    origins = [_facts_of(run, folder) for run, folder in zip(runs, folders, strict=True)]
    shared = _common_facts(origins)
    top = overview(runs, labels, verdicts, date.today())
    firsts = [_first_with_gallery(runs, each.runs) for each in labels.experiments]
    found, legend = gallery.maps(runs, firsts)
    tested = [n for n, e in enumerate(labels.experiments) if any(runs[i].records for i in e.runs)]
    pair = [labels.experiments[number].label for number in tested]
    return {
        "runs": runs,
        "folders": folders,
        "labels": labels,
        "colors": COLORS,
        "dash": dash,
        "top": top,
        "verdicts": verdicts,
        "pair": pair if len(pair) == 2 else verdicts and (verdicts.first, verdicts.second),
        "summaries": [_run_summary(run, main_metric(run, top.columns)) for run in runs],
        "classes": class_report(runs, labels),
        "curves": charts.training_curves(runs, labels),
        "plane": charts.information_plane(runs, labels),
        "views": gallery.views(runs),
        "neighbors": gallery.neighbors(runs, firsts),
        "maps": found,
        "map_legend": legend,
        "tables": tables.record_tables(runs),
        "terms": tables.metric_descriptions(runs),
        "reliability": charts.reliability_diagrams(runs, labels),
        "heat": tables.corruption_tables(runs, [each.runs for each in labels.experiments]),
        "corruptions": tables.corruption_notes(runs),
        "smoothness": charts.smoothness_histograms(runs, labels),
        "studies": studies(runs),
        "paper": tables.paper_rows(runs),
        "differences": tables.setting_differences(runs),
        "evaluated": [place for place, run in enumerate(runs) if run.records],
        "shared": shared,
        "origins": [[fact for fact in facts if fact not in shared] for facts in origins],
        "settings": [json.dumps(run.settings, indent=1, ensure_ascii=False) for run in runs],
    }


def _first_with_gallery(runs: Sequence[RunFolder], places: Sequence[int]) -> int:
    """Return the first run of an experiment that has a gallery; its other seeds are not shown."""
    return next((place for place in places if runs[place].gallery), places[0])


def _run_summary(run: RunFolder, metric: str) -> str:
    """Return method, data set, length and main metric of a run."""
    steps, method = run.series(), run.settings.get("method")
    named = " on ".join(filter(None, (method_name(method) if method else "", data_name(run))))
    length = f"{int(steps[-1][0]):,} steps" if steps else ""
    return ", ".join(filter(None, (named, length, metric)))


def _facts_of(run: RunFolder, folder: str) -> list[tuple[str, str]]:
    """Return how, where and with which versions a run and its records were made."""
    about = {"folder": folder, **flat(run.about)}
    tested = {f"evaluation: {key}": value for key, value in flat(run.evaluated).items()}
    commands = dict.fromkeys(record.command for record in run.records if record.command)
    return [
        *((k.removeprefix("versions."), str(v)) for k, v in (about | tested).items() if v != ""),
        *(("evaluation: command", command) for command in commands),
    ]


def _common_facts(origins: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return facts that are equal in all runs that have them, and that several runs have."""
    values: dict[str, list[str]] = {}
    for key, value in (fact for facts in origins for fact in facts):
        values.setdefault(key, []).append(value)
    return [(key, all_[0]) for key, all_ in values.items() if len(all_) > len(set(all_)) == 1]
