"""Ablations: metrics of runs over a setting that varies, and over the reducible residual."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compressive.reporting.summary import FIGURES, NATS, Spread, failure, figures_by_origin, spread
from compressive.reporting.svg import Drawing, Line, chart, minus
from compressive.rundir.reader import RunFolder
from compressive.rundir.records import finite_number

# Prefixes of settings that do not change what is learned; seeds are averaged over.
_NOT_LEARNED = (
    *("recipe", "seed", "data.cache_on_device", "data.workers", "health.", "probe."),
    *("train.activation_checkpointing", "train.compile", "train.device", "train.fused_norm"),
    *("train.log_every", "train.save_every", "train.tensorboard", "train.track"),
)
_TITLES = {  # name of a metric: title, axis label
    "held-out probe": ("Linear probe, held-out labels", "accuracy, %"),
    "held-out kNN": ("Nearest neighbors, held-out labels", "kNN accuracy, %"),
    "linear": ("Linear evaluation", "top-1, %"),
    "logistic": ("Logistic regression", "top-1, %"),
    "1 % labels": ("1 % of the labels", "top-1, %"),
    "kNN": ("Nearest neighbors", "top-1, %"),
    "corruptions": ("Corruptions, mean", "top-1, %"),
    "Brier": ("Brier score, lower is better", "Brier x 100"),
    "reducible_residual": ("Residual information, reducible part", "reducible residual (nats)"),
    "predictive": ("Shared information", "predictive (nats)"),
}


class Study(NamedTuple):
    """Drawings over one setting, with a line for each combination of the other settings."""

    setting: str
    notes: Sequence[str]
    lines: Sequence[tuple[int, str]]  # style and name of each; empty if there is only one
    curves: Sequence[Drawing]
    rates: Sequence[Drawing]


class _Series(NamedTuple):
    """Runs that differ only in one setting and in the seed, by the value of the setting."""

    name: str
    style: int | None
    runs: Mapping[float, list[RunFolder]]
    origins: Mapping[str, str]  # of each metric: only values of this origin are averaged

    def spread(self, value: float, figure: str) -> Spread | None:
        origin = self.origins.get(figure, "")
        found = [_final_figures(run).get(figure, {}) for run in self.runs.get(value, ())]
        there = [values[origin] for values in found if origin in values]
        return spread(there) if there else None


def _final_figures(run: RunFolder) -> dict[str, dict[str, float]]:
    """Return the metrics of a run, or nothing if it failed, is running or has only nats."""
    if failure(run) or not (run.records or run.is_over is not False):
        return {}
    found = figures_by_origin(run)
    return found if any(name not in NATS for name in found) else {}


def studies(runs: Sequence[RunFolder]) -> list[Study]:
    """Return a study for each numeric setting that differs between otherwise equal runs."""
    runs = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    vary = [
        name
        for name in names
        if not name.startswith(_NOT_LEARNED)
        and len({_setting_text(run, name) for run in runs if name in run.settings}) > 1
    ]
    found = (_study(runs, name, [n for n in vary if n != name]) for name in vary)
    return [study for study in found if study is not None]


def _setting_text(run: RunFolder, name: str) -> str:
    return json.dumps(run.settings.get(name))


def _study(runs: Sequence[RunFolder], setting: str, others: Sequence[str]) -> Study | None:
    by_kind: dict[str, dict[float, list[RunFolder]]] = {}
    for run in runs:
        value = finite_number(run.settings.get(setting))
        if value is not None:
            kind = ", ".join(f"{n.rpartition('.')[2]} {_setting_text(run, n)}" for n in others)
            by_kind.setdefault(kind, {}).setdefault(value, []).append(run)
    kinds = {kind: by_value for kind, by_value in by_kind.items() if len(by_value) > 1}
    counts: dict[str, Counter[str]] = {}
    for run in (run for by in kinds.values() for some in by.values() for run in some):
        for name, found in _final_figures(run).items():
            counts.setdefault(name, Counter()).update(found.keys())
    # The most common origin of each metric; of equals, that of the first run.
    origins = {name: count.most_common(1)[0][0] for name, count in counts.items()}
    groups = [
        _Series(kind.replace('"', ""), place if len(kinds) > 1 else None, by_value, origins)
        for place, (kind, by_value) in enumerate(kinds.items())
    ]
    values = sorted({value for group in groups for value in group.runs})
    curves = [c for name in FIGURES if (c := _curve(groups, values, setting, name)) is not None]
    if not curves:
        return None
    styles = [(group.style, group.name) for group in groups if group.style is not None]
    # The accuracy that most runs have, preferring linear, and that on corruptions.
    there = {
        name: sum(group.spread(v, name) is not None for group in groups for v in group.runs)
        for name in ("linear", "logistic")
    }
    over = [_accuracy_over_residual(groups, max(there, key=lambda name: there[name]))]
    over.append(_accuracy_over_residual(groups, "corruptions"))
    rates = [drawing for drawing in over if drawing is not None]
    return Study(setting, _study_notes(groups, values, setting), styles, curves, rates)


def _line(
    group: _Series, found: Sequence[tuple[float, Spread]], figure: str, name: str, **more: Any
) -> Line:
    """Return means over seeds, with standard deviations if any mean is of several seeds."""
    scale = 1.0 if figure in NATS else 100.0
    points = [(x, scale * one.mean) for x, one in found]
    bars = [scale * (one.std or 0.0) for _, one in found] if any(s.std for _, s in found) else []
    weights = [0.15] * len(points)
    return Line(points, group.style, group.name or name, weights=weights, bars=bars, **more)


def _curve(
    groups: Sequence[_Series], values: Sequence[float], setting: str, name: str
) -> Drawing | None:
    """Draw a metric over the values of a setting, equally spaced."""
    lines = []
    for group in groups:
        found = [(float(at), s) for at, v in enumerate(values) if (s := group.spread(v, name))]
        failed = [any(map(failure, group.runs.get(value, ()))) for value in values]
        crosses = [float(at) for at, has_failed in enumerate(failed) if has_failed]
        lines.append(_line(group, found, name, setting, crosses=crosses))
    if not any(line.points for line in lines):
        return None
    title, axis = _TITLES[name]
    return Drawing(title, chart(lines, setting, axis, names=[minus(f"{v:g}") for v in values]))


def _accuracy_over_residual(groups: Sequence[_Series], name: str) -> Drawing | None:
    """Draw a metric over the reducible residual, along the values of the setting."""
    lines = []
    for group in groups:
        found = [
            (v, group.spread(v, "reducible_residual"), group.spread(v, name))
            for v in sorted(group.runs)
        ]
        there = [(v, kept.mean, one) for v, kept, one in found if kept and one]
        words = [minus(f"{v:g}") for v, _, _ in there]
        lines.append(_line(group, [(x, one) for _, x, one in there], name, "runs", words=words))
    lines = [line for line in lines if line.points]
    if not any(len(line.points) > 1 for line in lines):
        return None
    return Drawing(_TITLES[name][0], chart(lines, "reducible residual (nats)", _TITLES[name][1]))


def _study_notes(groups: Sequence[_Series], values: Sequence[float], setting: str) -> list[str]:
    """Return explanations of the drawings."""
    notes = [f"Values of {setting} are in order and equally spaced."]
    counts = [s.n for g in groups for v in g.runs for name in FIGURES if (s := g.spread(v, name))]
    seeds = sorted(set(counts))
    if max(seeds, default=0) > 1:
        span = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
        notes.append(f"Points are means over {span} seeds per value; bars are standard deviations.")
    else:
        notes.append("There is one run per value: small differences may be due to chance.")
    shown = [_final_figures(r) for group in groups for runs in group.runs.values() for r in runs]
    origins = groups[0].origins
    if left := sum(any(origins[n] not in one[n] for n in one) for one in shown):
        were = "run was" if left == 1 else "runs were"
        notes.append(
            f"{left} {were} measured differently; values that cannot be compared are left out."
        )
    ends = [
        (end, minus(f"{value:g}"))
        for value in values
        for end in dict.fromkeys(failure(r) for g in groups for r in g.runs.get(value, ()))
        if end
    ]
    for end in dict.fromkeys(end for end, _ in ends):
        at = " and ".join(value for one, value in ends if one == end)
        notes.append(f"A cross marks runs that {end}, at {at}.")
    return notes
