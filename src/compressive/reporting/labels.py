"""Label runs by their method and the settings that differ, and group runs that differ in seed."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from compressive.rundir.folder import FREE
from compressive.rundir.reader import RunFolder

_METHODS = {
    **{"simclr": "SimCLR", "byol": "BYOL", "moco-v3": "MoCo v3", "simsiam": "SimSiam"},
    **{"dcl": "DCL", "vicreg": "VICReg"},
}
# As in `evaluation.compare`: runs that differ only in these are one experiment.
_IGNORED = (FREE - {"data.source"}) | {"seed"}
# Settings that are shown if they differ between methods. Recipes of methods differ in others.
_SHARED = (
    *("data.source", "data.limit", "network.name", "network.width", "views.size"),
    *("train.epochs", "train.steps", "train.batch_size"),
)
_MOST_SETTINGS = 3  # in a label


class RunGroup(NamedTuple):
    """Runs that differ only in their seed."""

    label: str
    runs: Sequence[int]  # positions


class Labels(NamedTuple):
    """Labels of runs, and the experiments that they belong to."""

    names: Sequence[str]  # one per run
    experiments: Sequence[RunGroup]
    of: Sequence[int]  # position of each run's experiment


def method_name(method: object) -> str:
    """Return a method as papers write it, such as C-SimCLR."""
    plain = str(method).removeprefix("c-")
    prefix = "C-" if str(method).startswith("c-") and plain in _METHODS else ""
    return prefix + _METHODS.get(plain, str(method))


def label_runs(runs: Sequence[RunFolder]) -> Labels:
    """Return labels that are unique, with the folder's name only if nothing else differs."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        kept = {name: value for name, value in run.settings.items() if name not in _IGNORED}
        key = json.dumps(kept, sort_keys=True) if kept else run.name
        groups.setdefault(key, []).append(place)
    firsts = [runs[places[0]] for places in groups.values()]
    titles = _unique([_experiment_label(run, firsts) for run in firsts], [r.name for r in firsts])
    experiments = [
        RunGroup(title, places) for title, places in zip(titles, groups.values(), strict=True)
    ]
    names, of = [""] * len(runs), [0] * len(runs)
    for number, (title, places) in enumerate(experiments):
        known = [runs[place].settings.get("seed") for place in places]
        seeds = [title if seed is None else f"{title}, seed {seed}" for seed in known]
        folders = [runs[place].name for place in places]
        each = [title] if len(places) == 1 else _unique(seeds, folders)
        for place, name in zip(places, each, strict=True):
            names[place], of[place] = name, number
    return Labels(names, experiments, of)


def _unique(titles: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Append the folder's name to titles that occur repeatedly."""
    counts = Counter(titles)
    pairs = zip(titles, folders, strict=True)
    return [title if counts[title] == 1 else f"{title} ({folder})" for title, folder in pairs]


def _experiment_label(run: RunFolder, others: Sequence[RunFolder]) -> str:
    """Return method and settings of the first run of an experiment."""
    if not run.settings.get("method"):
        return run.name
    rivals = [other for other in others if other.settings.get("method") == run.settings["method"]]
    differ = [*_differing(rivals)]
    differ += [name for name in _differing(others) if name in _SHARED and name not in differ]
    short = Counter(name.rpartition(".")[2] for name in differ)
    parts = [method_name(run.settings["method"])]
    for name in differ[:_MOST_SETTINGS]:
        last = name.rpartition(".")[2]
        value = json.dumps(run.settings.get(name)).strip('"')
        parts.append(f"{last if short[last] == 1 else name} {value}")
    return ", ".join(parts)


def _differing(runs: Sequence[RunFolder]) -> list[str]:
    """Return the settings that differ between runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in _IGNORED | {"method"}
        and len({json.dumps(run.settings.get(name)) for run in runs if run.settings}) > 1
    ]
