"""Measure how often a verdict is wrong for two methods, or two networks, that do not differ.

    python benchmarks/false_positives.py --trials 2000

Simulates comparisons without a difference, evaluates them with the code of `compressive compare`,
and prints one JSON object. Each rate has its Monte-Carlo standard error; both are in percent.

- Seeds: metrics of runs that differ only in their seed. Deviations of a seed are random mixtures
  of those in our result files (docs/results/2026-11-15-cifar10, six methods with three seeds each),
  so that they have the variances of each metric and the correlations between metrics.
- Images: hits of two networks that are right with the same probability on each image.
  Two seeds of one method also differ by the deviation of seeds in top-1.
- Draws: the two networks have the same mean accuracy over draws of few labels. The standard
  deviation of the difference over draws is from the same files.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from compressive.evaluation.compare import Difference, Experiment, compare
from compressive.evaluation.results import Results, read
from compressive.rundir.intervals import mean_part, t_interval, wilson_interval
from compressive.rundir.records import Record

RUNS = ROOT / "docs" / "results" / "2026-11-15-cifar10"
METHODS = (
    *("kappa10/simclr", "kappa10/c-simclr", "kappa5/simclr", "kappa5/c-simclr"),
    *("byol-200/byol", "byol-200/c-byol"),
)
METHOD_VERDICTS = ("better", "worse", "higher", "lower")
FEW = "few labels 1%/cifar/top-1"


def seeds_of_methods() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the metrics of all methods, their means, and seed deviations (methods x 3, metrics).

    A deviation from the mean of three seeds is too small by sqrt(2 / 3), which is corrected.
    """
    runs = [[read(RUNS / f"{name}-seed{seed}/evaluation") for seed in range(3)] for name in METHODS]
    tables = [[{r.key: r.value for r in run.records} for run in group] for group in runs]
    keys = [key for key in tables[0][0] if all(key in t for group in tables for t in group)]
    values = np.array([[[t[key] for key in keys] for t in group] for group in tables])
    apart = (values - values.mean(1, keepdims=True)) * math.sqrt(3 / 2)
    return keys, values.mean((0, 1)), apart.reshape(-1, len(keys))


def deviation_of_draws() -> float:
    """Return the standard deviation over draws of the difference of two seeds of one method."""
    found = []
    for name in METHODS:
        runs = [read(RUNS / f"{name}-seed{seed}/evaluation") for seed in range(3)]
        draws = [next(r for r in run.records if r.key == FEW).protocol["draws"] for run in runs]
        found += [np.var(np.subtract(draws[i], draws[j]), ddof=1) for i, j in ((0, 1), (0, 2))]
    return math.sqrt(float(np.mean(found)))


def run_of(values: dict[str, float], per_image: dict[str, np.ndarray], **protocol: Any) -> Results:
    """Return the results of a simulated run."""
    results = Results("simulated", values=per_image)
    for key, value in values.items():
        task, _, rest = key.partition("/")
        dataset, _, metric = rest.rpartition("/")
        results.records.append(
            Record(
                run="", task=task, dataset=dataset, metric=metric, value=value, low=None, high=None,
                n=0, images="same", of="", protocol=protocol, seed=0, command="",
            )
        )  # fmt: skip
    return results


def judged(random: np.random.Generator, count: int, shifted: int = 0) -> list[Difference]:
    """Compare two methods with `count` seeds each; the second differs in `shifted` metrics."""
    keys, means, apart = SEEDS
    mix = random.normal(size=(2, count, len(apart))) / math.sqrt(len(apart))
    values = means + mix @ apart
    values[1, :, :shifted] += 5 * apart[:, :shifted].std(0)
    groups = [
        Experiment(
            str(i), tuple(run_of(dict(zip(keys, v, strict=True)), {}) for v in each.tolist())
        )
        for i, each in enumerate(values)
    ]
    return compare(*groups)


def by_seeds(random: np.random.Generator, count: int) -> dict[str, float]:
    """Return wrong claims per metric and in any metric, without and with the adjustment."""
    found = judged(random, count)
    alone = [each.low is not None and not each.low <= 0 <= (each.high or 0) for each in found]
    return {
        "a metric, by its interval alone": float(np.mean(alone)),
        "any of the metrics, by intervals (no correction)": float(any(alone)),
        "a metric, adjusted verdict": float(
            np.mean([each.verdict in METHOD_VERDICTS for each in found])
        ),
        "any of the metrics, adjusted verdict": float(
            any(each.verdict in METHOD_VERDICTS for each in found)
        ),
    }


def with_real_differences(random: np.random.Generator) -> dict[str, float]:
    """Return the fraction of wrong verdicts if half of the metrics differ by five deviations."""
    found = judged(random, 3, shifted=len(SEEDS[0]) // 2)
    wrong = [each.verdict in METHOD_VERDICTS for each in found]
    return {
        "share of wrong ones among the verdicts, half of the metrics differ": float(
            sum(wrong[len(wrong) // 2 :]) / max(1, sum(wrong))
        )
    }


def hits(random: np.random.Generator, images: int, share: float, shift: float = 0) -> np.ndarray:
    """Return hits of two networks with the same chance on each image, near 0 or 1 for most."""
    a = share * 1.5
    chance = random.beta(a, 1.5 - a, size=images)
    return random.random((2, images)) < np.clip(chance + np.array([[0], [shift]]), 0, 1)


def by_images(random: np.random.Generator, images: int, share: float) -> dict[str, float]:
    """Compare one run each: two equal networks, and two seeds of one method."""
    name = "linear/set/top-1"
    seed_deviation = float(SEEDS[2][:, SEEDS[0].index("linear/cifar/top-1")].std())
    shift = math.sqrt(2) * seed_deviation * random.normal()
    said: dict[str, float] = {}
    for kind, moved in (("equal networks", 0.0), ("two seeds of one method", shift)):
        both = hits(random, images, share, moved).astype(float)
        groups = [
            Experiment(str(i), (run_of({name: float(each.mean())}, {name: each}),))
            for i, each in enumerate(both)
        ]
        (found,) = compare(*groups)
        said[f"{kind}: claim about the methods"] = float(found.verdict in METHOD_VERDICTS)
        if kind == "equal networks":
            said[f"{kind}: 'networks differ'"] = float(found.verdict == "networks differ")
        else:
            said[f"{kind}: interval over images without 0 (the former claim)"] = float(
                found.low is not None and not found.low <= 0 <= (found.high or 0)
            )
    return said


def by_draws(random: np.random.Generator, images: int) -> dict[str, float]:
    """Compare one run each with three draws of few labels, equal on average over all draws."""
    name, said = "few/set/top-1", {}
    moved = DRAWS * random.normal(size=3)
    each = np.stack([hits(random, images, 0.8, move) for move in moved], 1).astype(float)
    for kind, known in (("with", True), ("without", False)):
        groups = [
            Experiment(
                str(i),
                (
                    run_of(
                        {name: float(values.mean())},
                        {name: values.mean(0)},
                        **({"draws": values.mean(1).tolist()} if known else {}),
                    ),
                ),
            )
            for i, values in enumerate(each)
        ]
        (found,) = compare(*groups)
        said[f"few labels: 'networks differ', {kind} the variance of draws"] = float(
            found.verdict == "networks differ"
        )
    return said


def by_intervals(random: np.random.Generator) -> dict[str, float]:
    """Return which confidence intervals of one network do not contain the true value."""
    said = {}
    for n in (30, 200, 10_000):
        share = random.uniform(0.5, 1)
        low, high = wilson_interval(random.binomial(n, share) / n, n)
        said[f"Wilson's interval, {n:,} images"] = float(not low <= share <= high)
    low, high = wilson_interval(random.binomial(200, 0.99) / 200, 200)
    said["Wilson's interval, 200 images at 99 %"] = float(not low <= 0.99 <= high)
    image, draw = random.normal(0, 0.37, 10_000), random.normal(0, 0.008, 3)
    found = t_interval(image.mean() + draw.mean(), mean_part(image), mean_part(draw))
    assert found is not None
    said["interval of few labels"] = float(not found.low <= 0 <= found.high)
    return said


def rates(trial: Callable[[], dict[str, float]], trials: int) -> dict[str, list[float]]:
    """Return mean and standard error of each outcome, in percent."""
    found = [trial() for _ in range(trials)]
    each = {name: np.array([one[name] for one in found]) for name in found[0]}
    return {
        name: [round(100 * float(v.mean()), 2), round(100 * float(v.std() / math.sqrt(trials)), 2)]
        for name, v in each.items()
    }


SEEDS, DRAWS = seeds_of_methods(), deviation_of_draws()


def main() -> None:
    """Run all simulations and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    found: dict[str, Any] = {"trials": args.trials, "metrics": len(SEEDS[0])}
    for count in (2, 3, 5):
        name = f"methods by {count} seeds each"
        found[name] = rates(lambda count=count: by_seeds(random, count), args.trials)
    found["methods by 3 seeds each, some metrics differ"] = rates(
        lambda: with_real_differences(random), args.trials
    )
    for images, share in ((200, 0.95), (2000, 0.9), (10_000, 0.9)):
        name = f"one seed each, {images:,} images, top-1 {share:.0%}"
        found[name] = rates(
            lambda images=images, share=share: by_images(random, images, share), args.trials
        )
    found["one seed each, three draws of 1 % of the labels, 10,000 images"] = rates(
        lambda: by_draws(random, 10_000), args.trials
    )
    found["intervals of one network"] = rates(lambda: by_intervals(random), args.trials)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
