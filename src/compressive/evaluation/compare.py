"""Compare experiments: differences with confidence intervals, and verdicts."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from compressive.config import flat
from compressive.evaluation.results import Results, read
from compressive.metric_info import ACCURACIES, HIGHER, LOWER
from compressive.rundir import folder
from compressive.rundir.files import CONFIG, EVALUATION, FINETUNE, HELD_OUT, RESULTS
from compressive.rundir.intervals import Part, TInterval, adjusted_p, mean_part, t_interval
from compressive.rundir.records import Record

Verdict = (
    Literal["better", "worse", "higher", "lower", "networks differ", "undecided"]
    | Literal["one number each", "too few images", "measured differently"]
)

# Settings in which runs of one experiment may differ.
_SAME = (folder.FREE - {"data.source"}) | {"seed"}
# Keys of the protocol that must be equal for two numbers to be comparable.
_ALIKE = (
    *("classifier", "head", "augmentation", "epochs", "labels", "bank", "bound", "types"),
    *("left_out", "table", "source", "value", "train_images", "views", "norm"),
)
_OPTIONAL = ("learned_from",)  # likewise, but older results lack it
_FEW_IMAGES = 20  # with fewer pairs Student's interval of skewed values is too narrow
_LEVEL = 0.05


class Experiment(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    runs: tuple[Results, ...]


class Difference(NamedTuple):
    """Difference of a metric between two experiments, second minus first."""

    key: str
    first: float
    second: float
    difference: float
    low: float | None  # 95 % confidence interval of this metric alone
    high: float | None
    over: str  # images or seeds: what the interval is taken over
    verdict: Verdict  # by the adjusted p value
    p: float | None = None  # adjusted for all metrics that were compared


def open_groups(places: Sequence[str]) -> list[Experiment]:
    """Read results of runs and group runs that differ only in their seed."""
    found: dict[str, list[tuple[str, Results]]] = {}
    seeds: set[tuple[str, int | None]] = set()
    for place, short in zip(places, short_names(places), strict=True):
        name, seed = _settings_and_seed(place)
        if (name, seed) in seeds:
            raise ValueError(f"{place} is given twice, or has settings and seed of another run")
        seeds.add((name, seed))
        found.setdefault(name, []).append((short, read(place)))
    return [
        Experiment(" + ".join(name for name, _ in members), tuple(run for _, run in members))
        for members in found.values()
    ]


def short_names(places: Sequence[str]) -> list[str]:
    """Return paths without their common leading folders and without results folders."""
    if len(places) < 2:
        return list(places)
    names = [list(Path(place).parts) for place in places]
    for end, known in ((-1, (RESULTS,)), (-1, (EVALUATION, HELD_OUT)), (0, ())):
        while min(map(len, names)) > 1 and len({name[end] for name in names}) == 1:
            if known and names[0][end] not in known:
                break
            for name in names:
                name.pop(end)
    return [str(Path(*name)) for name in names]


def compare(first: Experiment, second: Experiment) -> list[Difference]:
    """Return the difference of every metric that all runs of both experiments have.

    Verdicts hold for all metrics together: p values are adjusted by Benjamini and Hochberg.
    """
    tables = [{record.key: record for record in run.records} for run in (*first.runs, *second.runs)]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    found = [_difference(key, first, second) for key in common]
    raw = {i: each.p for i, each in enumerate(found) if each.p is not None}
    for i, p in zip(raw, adjusted_p([*raw.values()]), strict=True):
        found[i] = found[i]._replace(p=p, verdict=_verdict(found[i], p))
    return found


def _settings_and_seed(place: str) -> tuple[str, int | None]:
    """Return the settings that runs of an experiment share, and the seed; or the path and None."""
    path = Path(place)
    inside = path if path.is_dir() else path.parent
    run = inside if (inside / CONFIG).exists() else inside.parent
    try:
        config = folder.read_config(run)
    except FileNotFoundError:
        return str(path), None
    settings = {name: v for name, v in flat(config).items() if name not in _SAME}
    return f"{settings} {_start_of(run)}", config.seed


def _start_of(run: Path) -> str:
    """Return the fingerprint of the encoder that a fine-tuning run started from, or ""."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((run / FINETUNE).read_bytes())["about"]["weights"])
    return ""


def _difference(key: str, first: Experiment, second: Experiment) -> Difference:
    records = [
        [next(record for record in run.records if record.key == key) for run in group.runs]
        for group in (first, second)
    ]
    every, values = [*records[0], *records[1]], [[each.value for each in some] for some in records]
    a, b = (math.fsum(each) / len(each) for each in values)
    draws = _draws(records)
    interval, over, verdict = None, "", "one number each"
    # Equal values of all seeds do not prove that seeds do not matter.
    if min(map(len, values)) >= 2 and any(len({*each}) > 1 for each in values):
        interval, over = t_interval(b - a, *map(mean_part, values), *draws), "seeds"
    elif (pairs := _paired(key, first, second, every)) is not None:
        interval, over = _over_images(pairs, key, draws), "images"
        verdict = "too few images" if len(pairs) < _FEW_IMAGES else verdict
    low, high, p = interval or (None, None, None)
    if not _alike(every):
        verdict = "measured differently"
    p = p if verdict == "one number each" else None
    return Difference(key, a, b, b - a, low, high, over if interval else "", verdict, p)


def _draws(records: Sequence[Sequence[Record]]) -> list[Part]:
    """Return the variance over draws of labels, which are the same in all runs; [] without draws.

    Older files have the draws of top-1 also for top-5: they do not have its mean.
    """
    draws: list[Any] = [[r.protocol.get("draws") for r in some] for some in records]
    for record, each in zip((*records[0], *records[1]), (*draws[0], *draws[1]), strict=True):
        if not isinstance(each, list) or len(each) < 2 or len(each) != len(draws[0][0]):
            return []
        if not math.isclose(math.fsum(each) / len(each), record.value, abs_tol=1e-6):
            return []
    first, second = (np.mean(some, axis=0) for some in draws)
    return [mean_part(second - first)]


def _alike(records: Sequence[Record]) -> bool:
    """Return whether a number was measured in the same way, and on the same images, in all runs."""

    def said(name: str) -> set[str]:
        return {str(record.protocol.get(name)) for record in records}

    same_images = len({(record.images, record.of) for record in records}) == 1
    optional = all(len(said(name) - {"None"}) <= 1 for name in _OPTIONAL)
    return same_images and optional and all(len(said(name)) == 1 for name in _ALIKE)


def _verdict(found: Difference, p: float) -> Verdict:
    """Return the verdict of an adjusted p value; single runs support no claim about methods."""
    metric, is_more = found.key.rpartition("/")[2], found.difference > 0
    if p > _LEVEL:
        return "undecided"
    if found.over == "images":
        return "networks differ"
    if metric in HIGHER:
        return "better" if is_more else "worse"
    if metric in LOWER:
        return "worse" if is_more else "better"
    return "higher" if is_more else "lower"


def _over_images(pairs: Float[np.ndarray, " n"], key: str, draws: Sequence[Part]) -> TInterval:
    """Return the interval of a mean difference over images; of equal pairs it is [0, 0].

    Accuracies get a pair for and a pair against (Bonett and Price, 2012). Without them four pairs
    in favor of 10,000 and none against would be a difference; a sign test wants six.
    """
    if key.rpartition("/")[2] in ACCURACIES:
        pairs = np.append(pairs, (1.0, -1.0))
    mean = float(pairs.mean())
    found = t_interval(mean, mean_part(pairs), *draws) if len(pairs) > 1 else None
    return found or TInterval(mean, mean, float(mean == 0))


def _paired(
    key: str, first: Experiment, second: Experiment, records: Sequence[Record]
) -> Float[np.ndarray, " n"] | None:
    """Return differences per image, if all runs have values of the same images."""
    images = {record.images for record in records}
    if len(images) > 1 or images == {""}:
        return None
    means = []
    for group in (first, second):
        each = [run.values[key] for run in group.runs if key in run.values]
        if len(each) < len(group.runs) or len({len(values) for values in each}) != 1:
            return None
        means.append(np.mean(each, axis=0, dtype=np.float64))
    return means[1] - means[0] if len(means[0]) == len(means[1]) else None
