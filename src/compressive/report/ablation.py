"""Ablations: what the runs came to against a setting that differs, and against what they kept."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from compressive.report.summary import FIGURES, NATS, Spread, failure, spread, told
from compressive.report.svg import Line, Picture, chart, minus
from compressive.rundir.reader import Run, number

# Settings that do not change what is learned (seeds are averaged over), by their beginning.
_ASIDE = (
    *(
        "recipe",
        "seed",
        "data.cache_on_device",
        "data.workers",
        "health.",
        "probe.",
        "train.compile",
    ),
    *("train.device", "train.log_every", "train.activation_checkpointing", "train.save_every"),
    "train.tensorboard",
)
_WORDS = {  # name of a figure: title, words at the axis
    "held-out probe": ("Probe, labels held out of train", "accuracy, %"),
    "held-out kNN": ("Nearest neighbors, held-out labels", "neighbors' accuracy, %"),
    "linear": ("Linear evaluation", "top-1, %"),
    "logistic": ("Logistic regression", "top-1, %"),
    "1 % labels": ("1 % of the labels", "top-1, %"),
    "kNN": ("Nearest neighbors", "top-1, %"),
    "corruptions": ("Corruptions, mean", "top-1, %"),
    "Brier": ("Brier score, lower is better", "Brier x 100"),
    "reducible_residual": ("Information kept, its reducible part", "reducible residual (nats)"),
    "predictive": ("Information that is shared", "predictive (nats)"),
}


class Study(NamedTuple):
    """Drawings over one setting; a line for each way in which the runs differ otherwise."""

    setting: str
    notes: Sequence[str]
    lines: Sequence[tuple[int, str]]  # style and words of each; none where there is only one
    curves: Sequence[Picture]
    rates: Sequence[Picture]


class _Group(NamedTuple):
    """Runs that differ in one setting and in the seed alone, by its value."""

    name: str
    style: int | None
    runs: Mapping[float, list[Run]]
    origins: Mapping[str, str]  # of each figure: others cannot be averaged with it

    def spread(self, value: float, figure: str) -> Spread | None:
        origin = self.origins.get(figure, "")
        found = [_shown(run).get(figure, {}) for run in self.runs.get(value, ())]
        there = [values[origin] for values in found if origin in values]
        return spread(there) if there else None


def _shown(run: Run) -> dict[str, dict[str, float]]:
    """What a run has come to; nothing where it failed, still goes on, or has a journal alone."""
    if failure(run) or not (run.figures or run.is_over is not False):
        return {}
    found = told(run)
    return found if any(name not in NATS for name in found) else {}


def _origins(runs: Iterable[Run]) -> dict[str, str]:
    """What most of the runs have each figure from; of equals the one that is best in the first."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for name, values in _shown(run).items():
            counts.setdefault(name, Counter()).update(values.keys())
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def studies(runs: Sequence[Run]) -> list[Study]:
    """A study for each number that differs between runs that are otherwise alike."""
    runs = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    vary = [
        name
        for name in names
        if not name.startswith(_ASIDE)
        and len({_text(run, name) for run in runs if name in run.settings}) > 1
    ]
    found = [_study(runs, name, [n for n in vary if n != name]) for name in vary]
    return [study for study in found if study is not None]


def _text(run: Run, name: str) -> str:
    return json.dumps(run.settings.get(name))


def _study(runs: Sequence[Run], setting: str, others: Sequence[str]) -> Study | None:
    by_kind: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        value = number(run.settings.get(setting))
        if value is not None:
            kind = ", ".join(f"{n.rpartition('.')[2]} {_text(run, n)}" for n in others)
            by_kind.setdefault(kind, {}).setdefault(value, []).append(run)
    kinds = {kind: by_value for kind, by_value in by_kind.items() if len(by_value) > 1}
    origins = _origins(run for by in kinds.values() for some in by.values() for run in some)
    groups = [
        _Group(kind.replace('"', ""), place if len(kinds) > 1 else None, by_value, origins)
        for place, (kind, by_value) in enumerate(kinds.items())
    ]
    values = sorted({value for group in groups for value in group.runs})
    curves = [c for name in FIGURES if (c := _curve(groups, values, setting, name)) is not None]
    if not curves:
        return None
    return Study(
        setting,
        _notes(groups, values, setting),
        [(group.style, group.name) for group in groups if group.style is not None],
        curves,
        [rate for name in _heads(groups) if (rate := _rate(groups, name)) is not None],
    )


def _scale(name: str) -> float:
    return 1.0 if name in NATS else 100.0


def _curve(
    groups: Sequence[_Group], values: Sequence[float], setting: str, name: str
) -> Picture | None:
    """A figure against the values, which stand at equal distances."""
    lines, by = [], _scale(name)
    for group in groups:
        found = [(at, s) for at, v in enumerate(values) if (s := group.spread(v, name))]
        failed = [
            float(at) for at, v in enumerate(values) if any(map(failure, group.runs.get(v, ())))
        ]
        lines.append(
            Line(
                [(float(at), by * one.mean) for at, one in found],
                group.style,
                group.name or setting,
                weights=[0.15] * len(found),
                bars=_bars([one for _, one in found], by),
                crosses=failed,
            )
        )
    if not any(line.points for line in lines):
        return None
    title, axis = _WORDS[name]
    return Picture(title, chart(lines, setting, axis, names=[minus(f"{v:g}") for v in values]))


def _bars(found: Sequence[Spread], by: float) -> list[float]:
    """Deviations, where some figure is of several seeds."""
    return [by * (one.std or 0.0) for one in found] if any(one.std for one in found) else []


def _heads(groups: Sequence[_Group]) -> list[str]:
    """The accuracy that most runs have, the paper's first; and that on corrupted images."""
    count = {
        name: sum(group.spread(v, name) is not None for group in groups for v in group.runs)
        for name in ("linear", "logistic")
    }
    return [max(count, key=lambda name: count[name]), "corruptions"]


def _rate(groups: Sequence[_Group], name: str) -> Picture | None:
    """A figure against the nats that were kept, from value to value of the setting."""
    lines, by = [], _scale(name)
    for group in groups:
        found = [
            (v, group.spread(v, "reducible_residual"), group.spread(v, name))
            for v in sorted(group.runs)
        ]
        there = [(v, kept.mean, one) for v, kept, one in found if kept and one]
        lines.append(
            Line(
                [(kept, by * one.mean) for _, kept, one in there],
                group.style,
                group.name or "runs",
                weights=[0.15] * len(there),
                bars=_bars([one for _, _, one in there], by),
                words=[minus(f"{v:g}") for v, _, _ in there],
            )
        )
    lines = [line for line in lines if line.points]
    if not any(len(line.points) > 1 for line in lines):
        return None
    return Picture(_WORDS[name][0], chart(lines, "reducible residual (nats)", _WORDS[name][1]))


def _notes(groups: Sequence[_Group], values: Sequence[float], setting: str) -> list[str]:
    """What the drawings do not say by themselves."""
    notes = [f"The values of {setting} stand in order, at equal distances."]
    counts = [s.n for g in groups for v in g.runs for name in FIGURES if (s := g.spread(v, name))]
    seeds = sorted(set(counts))
    if max(seeds, default=0) > 1:
        span = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
        notes.append(f"Points are means over seeds ({span} of a value), bars their deviation.")
    else:
        notes.append("One run of each: small differences may be chance.")
    shown = [_shown(r) for group in groups for runs in group.runs.values() for r in runs]
    origins = groups[0].origins
    if left := sum(any(origins[n] not in one[n] for n in one) for one in shown):
        were = "run was" if left == 1 else "runs were"
        notes.append(f"{left} {were} judged otherwise, and what cannot be compared is left out.")
    ends = [
        (end, minus(f"{value:g}"))
        for value in values
        for end in dict.fromkeys(failure(r) for g in groups for r in g.runs.get(value, ()))
        if end
    ]
    for end in dict.fromkeys(end for end, _ in ends):
        at = " and ".join(value for one, value in ends if one == end)
        notes.append(f"A cross: {end}, at {at}.")
    return notes
