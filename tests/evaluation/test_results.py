"""A number is written with where it comes from, and read back."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import results_text

from compressive.evaluation.results import Results, read
from compressive.metrics import bootstrap_interval
from compressive.rundir.versions import UnsupportedFormat


def some() -> Results:
    results = Results("runs/a", seed=3, command="compressive evaluate runs/a")
    hits = torch.arange(40) % 4 > 0
    results.add("linear", "set", "top-1", hits, protocol={"epochs": 2})
    results.add("linear", "set", "ece", 0.25, n=40, protocol={})
    results.skipped.append("frost")
    results.about = {"weights": "abc"}
    return results


def test_the_mean_of_values_has_the_bootstrap_interval() -> None:
    record = some().records[0]
    low, high = bootstrap_interval(torch.arange(40) % 4 > 0, seed=3)
    assert (record.value, record.n) == (0.75, 40)
    # The values are float64 here, a bool's interval float32.
    assert (record.low, record.high) == pytest.approx((float(low), float(high)), abs=1e-6)
    assert some().records[1].low is None


def test_no_accuracy_is_beyond_all_or_nothing() -> None:
    """Of values that are weighted by their classes' sizes a resampled mean can be above 1."""
    weighted = torch.tensor([3.0, 0.5, 0.5, 0.5, 0.5, 0.5])  # 1 of 1 and 5 of 5, but resampled
    record = Results("a").add("linear", "set", "mean per class", weighted, protocol={})
    assert float(bootstrap_interval(weighted.double()).high) > 1
    assert record.high == 1
    other = Results("a").add("linear", "set", "nll", weighted, protocol={})
    assert other.high is not None
    assert other.high > 1


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = some().write(tmp_path / "out")
    found = read(path.parent)
    assert found.records == some().records
    assert found.skipped == ["frost"]
    assert found.about == {"weights": "abc"}
    np.testing.assert_array_equal(found.values["linear/set/top-1"], np.arange(40) % 4 > 0)
    assert read(path).records == found.records, "the file will do as well as its folder"
    assert json.loads(path.read_text())["records"][0]["command"] == "compressive evaluate runs/a"


def test_a_missing_file_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="compressive evaluate"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "\xff", "3", '{"format_version": 2}', results_text([{"run": 1}])),
        results_text(["b"]),
        results_text([asdict(some().records[0]) | {"value": "x"}]),
        results_text([asdict(some().records[0]) | {"protocol": 3}]),
        results_text([asdict(some().records[0]) | {"unknown": 3}]),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("version", [None, 1, 3])
def test_another_format_is_refused_by_its_number(version: int | None, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(results_text([], format_version=version))
    with pytest.raises(UnsupportedFormat, match=rf"results\.json.*format {version or 1}\b"):
        read(tmp_path)


def test_what_was_measured_before_stays_until_it_is_measured_anew() -> None:
    old, new = some(), Results("runs/a", seed=3)
    new.about = {"weights": "abc"}
    new.begin_with(old)
    new.add("linear", "set", "ece", 0.5, n=40, protocol={})
    assert [(r.metric, r.value) for r in new.records] == [("top-1", 0.75), ("ece", 0.5)]
    assert list(new.values) == ["linear/set/top-1"]
    other = Results("runs/a", seed=3)
    other.about = {"weights": "others"}
    other.begin_with(old)
    assert other.records == []


def test_a_set_whose_name_begins_alike_is_another_set() -> None:
    old = Results("runs/a")
    old.about, old.set, old.of = {"weights": "w"}, "cifar100", "x"
    for dataset in ("cifar100", "cifar100 test", "cifar100-C fog"):
        old.add("linear", dataset, "top-1", 0.5, protocol={})
    for name, kept in (("cifar10", 3), ("cifar100", 0)):
        new = Results("runs/a")
        new.about, new.set, new.of = {"weights": "w"}, name, "y"
        new.begin_with(old)
        assert len(new.records) == kept, name
