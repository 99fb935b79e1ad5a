"""Runs side by side: differences with an interval, and a verdict that noise does not make."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.config import flat
from compressive.evaluation.results import Record, Results, read
from compressive.metric_info import HIGHER, LOWER
from compressive.metrics import bootstrap_interval
from compressive.rundir import folder
from compressive.rundir.files import CONFIG, EVALUATION, HELD_OUT, RESULTS

Verdict = Literal[
    "better",
    "worse",
    "higher",
    "lower",
    "undecided",
    "one number each",
    "too few images",
    "measured differently",
]

# Settings in which two runs may differ and still be the same experiment with another seed.
_SAME = (folder.FREE - {"data.source"}) | {"seed"}
# What two numbers must have in common to be compared.
_ALIKE = (
    *("classifier", "head", "augmentation", "epochs", "labels", "bank", "bound", "types"),
    *("left_out", "table", "source", "value", "train_images", "views", "norm"),
)
_LATER = ("learned_from",)  # likewise, but older results do not say it
_FEW = 20  # paired images below which a bootstrap calls noise a gain in more than 5 % of cases


class Group(NamedTuple):
    """Runs of one experiment, which differ in their seed."""

    name: str
    runs: tuple[Results, ...]


class Difference(NamedTuple):
    """A figure of two groups; the second less the first, and how sure that is."""

    key: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    over: str  # what the interval is over
    verdict: Verdict


def open_groups(places: Sequence[str]) -> list[Group]:
    """Results of runs, those together whose settings differ in the seed alone."""
    found: dict[str, list[tuple[str, Results]]] = {}
    seeds: set[tuple[str, int | None]] = set()
    for place, short in zip(places, short_names(places), strict=True):
        name, seed = _experiment(place)
        if (name, seed) in seeds:
            raise ValueError(f"{place} is given twice, or has settings and seed of another run")
        seeds.add((name, seed))
        found.setdefault(name, []).append((short, read(place)))
    return [
        Group(" + ".join(name for name, _ in members), tuple(results for _, results in members))
        for members in found.values()
    ]


def short_names(places: Sequence[str]) -> list[str]:
    """Paths without the folders that all have in common in front, and without the results'."""
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


def compare(first: Group, second: Group) -> list[Difference]:
    """Every figure that all runs of both groups have."""
    tables = [{record.key: record for record in run.records} for run in (*first.runs, *second.runs)]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return [_difference(key, first, second) for key in common]


def _experiment(place: str) -> tuple[str, int | None]:
    """What runs with another seed have in common, and the seed; or the place, without settings."""
    path = Path(place)
    inside = path if path.is_dir() else path.parent
    run = inside if (inside / CONFIG).exists() else inside.parent
    try:
        config = folder.read_config(run)
    except FileNotFoundError:
        return str(path), None
    settings = {name: v for name, v in flat(config).items() if name not in _SAME}
    return str(settings), config.seed


def _difference(key: str, first: Group, second: Group) -> Difference:
    values = [[_record(run, key).value for run in group.runs] for group in (first, second)]
    a, b = (math.fsum(each) / len(each) for each in values)
    low = high = pairs = None
    over = ""
    if min(map(len, values)) >= 2 and (found := _over_seeds(*values)) is not None:
        (low, high), over = found, "seeds"
    elif (pairs := _paired(key, first, second)) is not None:
        found = bootstrap_interval(pairs)
        low, high, over = float(found.low), float(found.high), "images"
    verdict = _verdict(key.rpartition("/")[2], low, high)
    if pairs is not None and len(pairs) < _FEW:
        verdict = "too few images"
    if not _alike(key, first, second):
        verdict = "measured differently"
    return Difference(key, a, b, b - a, low, high, over, verdict)


def _alike(key: str, first: Group, second: Group) -> bool:
    """Whether a number means the same in all runs, and is of the same images."""
    records = [_record(run, key) for run in (*first.runs, *second.runs)]
    if len({(record.images, record.of) for record in records}) > 1:
        return False
    if any(len({str(r.protocol.get(name)) for r in records} - {"None"}) > 1 for name in _LATER):
        return False
    return all(len({str(r.protocol.get(name)) for r in records}) == 1 for name in _ALIKE)


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


def _record(run: Results, key: str) -> Record:
    return next(record for record in run.records if record.key == key)


def _paired(key: str, first: Group, second: Group) -> Float[Tensor, " n"] | None:
    """Differences image by image, where all runs have values of the same images."""
    images = {_record(run, key).images for run in (*first.runs, *second.runs)}
    if len(images) > 1 or images == {""}:
        return None
    means = []
    for group in (first, second):
        each = [run.values[key] for run in group.runs if key in run.values]
        if len(each) < len(group.runs) or len({len(values) for values in each}) != 1:
            return None
        means.append(torch.stack(each).double().mean(0))
    return means[1] - means[0] if len(means[0]) == len(means[1]) else None


def _over_seeds(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Welch's 95 % interval for the difference of two means, of runs that differ in their seed.

    None where all runs of a group have one value: of few images, no proof that seeds do not matter.
    """
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (first, second))
    parts = [float(each.var()) / len(each) for each in (a, b)]
    error = math.sqrt(sum(parts))
    difference = float(b.mean() - a.mean())
    if error == 0:
        return None
    spread = sum(p * p / (len(e) - 1) for p, e in zip(parts, (a, b), strict=True))
    reach = t_quantile(0.975, sum(parts) ** 2 / spread) * error
    return difference - reach, difference + reach


def t_quantile(p: float, freedom: float) -> float:
    """Where Student's t with these degrees of freedom has p of its probability below, p > 1/2.

    With t = sqrt(freedom) tan(angle) its density in the angle is cos^(freedom - 1), smooth on a
    bounded interval: Simpson's rule, and bisection.
    """
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2

    def below(angle: float, pieces: int = 400) -> float:
        x = torch.linspace(0, angle, pieces + 1, dtype=torch.float64)
        height = x.cos().pow(freedom - 1)
        weights = torch.full_like(x, 2.0)
        weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
        area = float((weights * height).sum()) * angle / pieces / 3
        return 0.5 + math.exp(log_scale) * area

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
