"""Compare experiments: differences with confidence intervals, and verdicts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from compressive.config import flat
from compressive.evaluation.results import Results, read
from compressive.metric_info import HIGHER, LOWER
from compressive.rundir import folder
from compressive.rundir.files import CONFIG, EVALUATION, HELD_OUT, RESULTS
from compressive.rundir.records import Record

Verdict = (
    Literal["better", "worse", "higher", "lower", "undecided"]
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
_FEW_IMAGES = 20  # with fewer pairs a bootstrap reports noise as a gain in over 5 % of cases


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
    low: float | None
    high: float | None
    over: str  # images or seeds: what the interval is taken over
    verdict: Verdict


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
    """Return the difference of every metric that all runs of both experiments have."""
    tables = [{record.key: record for record in run.records} for run in (*first.runs, *second.runs)]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return [_difference(key, first, second) for key in common]


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
    return str(settings), config.seed


def _difference(key: str, first: Experiment, second: Experiment) -> Difference:
    records = [
        [next(record for record in run.records if record.key == key) for run in group.runs]
        for group in (first, second)
    ]
    every, values = records[0] + records[1], [[each.value for each in some] for some in records]
    a, b = (math.fsum(each) / len(each) for each in values)
    low = high = pairs = None
    over = ""
    if min(map(len, values)) >= 2 and (found := _over_seeds(*values)) is not None:
        (low, high), over = found, "seeds"
    elif (pairs := _paired(key, first, second, every)) is not None:
        (low, high), over = paired_bootstrap(pairs), "images"
    verdict = _verdict(key.rpartition("/")[2], low, high)
    if pairs is not None and len(pairs) < _FEW_IMAGES:
        verdict = "too few images"
    if not _alike(every):
        verdict = "measured differently"
    return Difference(key, a, b, b - a, low, high, over, verdict)


def _alike(records: Sequence[Record]) -> bool:
    """Return whether a number was measured in the same way, and on the same images, in all runs."""

    def said(name: str) -> set[str]:
        return {str(record.protocol.get(name)) for record in records}

    same_images = len({(record.images, record.of) for record in records}) == 1
    optional = all(len(said(name) - {"None"}) <= 1 for name in _OPTIONAL)
    return same_images and optional and all(len(said(name)) == 1 for name in _ALIKE)


def _verdict(metric: str, low: float | None, high: float | None) -> Verdict:
    if low is None or high is None:
        return "one number each"
    if low <= 0 <= high:
        return "undecided"
    if metric in HIGHER:
        return "better" if low > 0 else "worse"
    if metric in LOWER:
        return "worse" if low > 0 else "better"
    return "higher" if low > 0 else "lower"


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


def paired_bootstrap(pairs: Float[np.ndarray, " n"], draws: int = 1000) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean, as `metrics.bootstrap_interval` draws it.

    NumPy instead of torch, which takes seconds to import, because `compressive report` compares.
    """
    random, n = np.random.RandomState(0), len(pairs)
    rows = max(1, 2**20 // n)
    means = []
    for start in range(0, draws, rows):
        size = (min(rows, draws - start), n)
        chosen = random.randint(0, 2**32, size, dtype=np.uint32) % n
        means.append(pairs[chosen].mean(1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def _over_seeds(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return Welch's 95 % confidence interval for the difference of the means over seeds.

    None if the variance is zero: equal values of few images do not prove that seeds do not matter.
    """
    parts = [float(np.var(each, ddof=1)) / len(each) for each in (first, second)]
    error = math.sqrt(sum(parts))
    difference = float(np.mean(second) - np.mean(first))
    if error == 0:
        return None
    spread = sum(p * p / (len(e) - 1) for p, e in zip(parts, (first, second), strict=True))
    reach = t_quantile(0.975, sum(parts) ** 2 / spread) * error
    return difference - reach, difference + reach


def t_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution for p > 1/2.

    With t = sqrt(freedom) tan(angle) the density in the angle is cos^(freedom - 1), which is smooth
    on a bounded interval. Integrate it with Simpson's rule and invert by bisection.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2

    def below(angle: float, pieces: int = 400) -> float:
        x = np.linspace(0, angle, pieces + 1)
        height = np.cos(x) ** (freedom - 1)
        weights = np.full_like(x, 2.0)
        weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
        area = float((weights * height).sum()) * angle / pieces / 3
        return 0.5 + math.exp(log_scale) * area

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
