"""Results are written with their provenance and read back."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import results_text
from scipy import stats

from compressive.evaluation.results import Results, read
from compressive.metrics import bootstrap_interval
from compressive.rundir.versions import UnsupportedFormat


def example_results() -> Results:
    results = Results("runs/a", seed=3, command="compressive evaluate runs/a")
    hits = torch.arange(40) % 4 > 0
    results.add("linear", "set", "top-1", hits, protocol={"epochs": 2})
    results.add("linear", "set", "ece", 0.25, n=40, protocol={})
    results.skipped.append("frost")
    results.about = {"weights": "abc"}
    return results


def test_proportion_has_the_wilson_interval() -> None:
    """A bootstrap interval would be [1, 1] if all predictions are correct."""
    record = example_results().records[0]
    wilson = stats.binomtest(30, 40).proportion_ci(method="wilson")
    assert (record.value, record.n) == (0.75, 40)
    assert (record.low, record.high) == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    assert example_results().records[1].low is None
    record = Results("a").add("kNN", "set", "top-1", torch.ones(30).bool(), protocol={})
    assert record.low == pytest.approx(stats.binomtest(30, 30).proportion_ci(method="wilson").low)
    assert record.high == 1


@pytest.mark.parametrize("metric", ["nll", "top-1", "mean per class"])
def test_other_means_have_the_bootstrap_interval(metric: str) -> None:
    """An accuracy that is a mean over severities also has the bootstrap interval."""
    values = torch.arange(40).double() % 4 / 3
    record = Results("a", seed=3).add("corruption", "set", metric, values, protocol={})
    low, high = bootstrap_interval(values, seed=3)
    assert (record.low, record.high) == (float(low), float(high))


def test_few_label_interval_includes_variance_of_draws() -> None:
    """Draws of 45.0, 37.2 and 46.6 were once printed as 42.9 [40.2, 45.5]."""
    hits = [torch.arange(1335) % 1000 < 10 * p for p in (45.0, 37.2, 46.6)]
    draws, n = [float(hit.double().mean()) for hit in hits], len(hits[0])
    mean = torch.stack(hits).double().mean(0)
    add = Results("a").add
    record = add("few", "set", "top-1", mean, protocol={}, draws=draws)
    variances = float(mean.var()) / n, np.var(draws, ddof=1) / 3
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (n - 1) + variances[1] ** 2 / 2)
    reach = stats.t.ppf(0.975, freedom) * sum(variances) ** 0.5
    expected = record.value - reach, record.value + reach
    assert (record.low, record.high) == pytest.approx(
        expected, abs=1e-3
    )  # one more hit and one more miss
    assert record.low is not None
    assert record.low < min(draws)
    alone = add("few", "set", "top-1", hits[0].double(), protocol={}, draws=draws[:1])
    wilson = stats.binomtest(int(hits[0].sum()), n).proportion_ci(method="wilson")
    assert alone.low == pytest.approx(wilson.low)
    sure = add("few", "set", "top-1", torch.ones(30), protocol={}, draws=[1.0, 1.0, 1.0])
    assert sure.low is not None
    assert sure.low < 0.95
    assert sure.high == 1


def test_accuracy_interval_is_clipped_at_1() -> None:
    """Resampled means of class-weighted values can exceed 1."""
    weighted = torch.tensor([3.0, 0.5, 0.5, 0.5, 0.5, 0.5])  # 1 of 1 and 5 of 5 correct
    record = Results("a").add("linear", "set", "mean per class", weighted, protocol={})
    assert float(bootstrap_interval(weighted.double()).high) > 1
    assert record.high == 1
    other = Results("a").add("linear", "set", "nll", weighted, protocol={})
    assert other.high is not None
    assert other.high > 1


def test_results_round_trip(tmp_path: Path) -> None:
    path = example_results().write(tmp_path / "out")
    found = read(path.parent)
    assert found.records == example_results().records
    assert found.skipped == ["frost"]
    assert found.about == {"weights": "abc"}
    np.testing.assert_array_equal(found.values["linear/set/top-1"], np.arange(40) % 4 > 0)
    assert read(path).records == found.records, "reading the file differs from reading its folder"
    assert json.loads(path.read_text())["records"][0]["command"] == "compressive evaluate runs/a"


def test_missing_file_names_the_evaluate_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="compressive evaluate"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "\xff", "3", '{"format_version": 2}', results_text([{"run": 1}])),
        results_text(["b"]),
        results_text([asdict(example_results().records[0]) | {"value": "x"}]),
        results_text([asdict(example_results().records[0]) | {"protocol": 3}]),
        results_text([asdict(example_results().records[0]) | {"unknown": 3}]),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("version", [None, 1, 3])
def test_unsupported_format_version_is_refused(version: int | None, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(results_text([], format_version=version))
    with pytest.raises(UnsupportedFormat, match=rf"results\.json.*format {version or 1}\b"):
        read(tmp_path)


def test_earlier_records_are_kept_until_replaced() -> None:
    old, new = example_results(), Results("runs/a", seed=3)
    new.about = {"weights": "abc"}
    new.begin_with(old)
    new.add("linear", "set", "ece", 0.5, n=40, protocol={})
    assert [(r.metric, r.value) for r in new.records] == [("top-1", 0.75), ("ece", 0.5)]
    assert list(new.values) == ["linear/set/top-1"]
    other = Results("runs/a", seed=3)
    other.about = {"weights": "others"}
    other.begin_with(old)
    assert other.records == []


def test_dataset_names_with_a_common_prefix_are_distinct() -> None:
    old = Results("runs/a")
    old.about, old.set, old.of = {"weights": "w"}, "cifar100", "x"
    for dataset in ("cifar100", "cifar100 test", "cifar100-C fog"):
        old.add("linear", dataset, "top-1", 0.5, protocol={})
    for name, kept in (("cifar10", 3), ("cifar100", 0)):
        new = Results("runs/a")
        new.about, new.set, new.of = {"weights": "w"}, name, "y"
        new.begin_with(old)
        assert len(new.records) == kept, name
