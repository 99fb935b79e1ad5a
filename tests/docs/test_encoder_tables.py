"""Tables of docs/results/2026-11-18-encoders.md match the result file and the bundled encoders."""

import hashlib
import json
from pathlib import Path

import pytest
from result_tables import table_rows

from compressive import weights

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-18-encoders.md"
RESULTS = {
    run["encoder"]: run
    for run in json.loads((PAGE.with_suffix("") / "eight-bits.json").read_text())["runs"]
}


TRAINED = "## How they were trained"
COLUMNS = {
    "linear": "linear top-1",
    "logistic": "logistic top-1",
    "kNN, k = 20": "kNN 20 top-1",
    "1 % of the labels": "few labels 1% top-1",
    "10 %": "few labels 10% top-1",
    "corruptions": "corruptions cifar10-C top-1",
}


def percent(found: dict[str, float]) -> str:
    """Return a score in percent with its interval, as tables show it."""
    value, low, high = (100 * found[key] for key in ("value", "low", "high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def test_files() -> None:
    rows = table_rows(PAGE, "## Files", "SHA-256")
    assert [row["name"].strip("`") for row in rows] == list(weights.names())
    sizes = []
    for row in rows:
        path = weights.find(row["name"].strip("`"))
        assert path is not None
        assert row["SHA-256"] == f"`{hashlib.sha256(path.read_bytes()).hexdigest()}`"
        sizes.append(path.stat().st_size)
        assert row["bytes"] == f"{sizes[-1]:,}"
    assert f"have {sum(sizes):,} bytes" in PAGE.read_text()


def test_accuracies() -> None:
    rows = table_rows(PAGE, "## What 8 bits cost", "equal predictions")
    assert len(rows) == 4
    worst = 0.0
    for row in rows:
        found = RESULTS[row["encoder"].strip("`")][row["metric"]]
        difference = found["8 bits"] - found["before"]
        error = found["standard error of the difference"]
        worst = max(worst, abs(difference) / error)
        assert float(row["before"]) == pytest.approx(found["before"], abs=0.006)
        assert float(row["8 bits"]) == pytest.approx(found["8 bits"], abs=0.006)
        shown = [float(number) for number in row["difference"].split(" ± ")]
        assert shown == pytest.approx([difference, error], abs=0.006)
        assert float(row["equal predictions"]) == pytest.approx(
            found["equal predictions"], abs=0.06
        )
    assert f"larger than {worst:.1f} standard errors" in " ".join(PAGE.read_text().split())


def test_features() -> None:
    rows = table_rows(PAGE, "## What 8 bits cost", "mean cosine")
    assert len(rows) == 2
    for row in rows:
        found = RESULTS[row["encoder"].strip("`")]
        assert float(row["least cosine of features"]) <= found["cosine"]["least"] + 5e-6
        assert float(row["mean cosine"]) == pytest.approx(found["cosine"]["mean"], abs=6e-6)
        assert float(row["mean relative error"]) == pytest.approx(
            found["relative_error"]["mean"], abs=6e-5
        )


def test_all_images_of_cifar10() -> None:
    found = json.loads((PAGE.with_suffix("") / "all-images.json").read_text())
    text = " ".join(PAGE.read_text().split())
    knn, logistic = found["kNN"], found["logistic"]
    change = knn["8 bits"] - knn["before"]
    error = knn["standard error of the difference"]
    assert f"kNN {knn['before']} before and {knn['8 bits']} with 8 bits ({change:.2f} ± " in text
    assert f"± {error:.2f}, {knn['equal predictions']:.1f} % equal" in text
    assert logistic["before"] == logistic["8 bits"]
    assert f"logistic {logistic['before']} before and after" in text


def test_accuracies_on_tiny_imagenet_100() -> None:
    (row,) = [r for r in table_rows(PAGE, TRAINED, "logistic") if next(iter(r)) == "linear"]
    records = json.loads((PAGE.with_suffix("") / "tiny-imagenet-100.json").read_text())["records"]
    tasks = ("linear", "logistic", "kNN 20", "few labels 1%", "few labels 10%", "corruptions")
    for shown, task in zip(row.values(), tasks, strict=True):
        (found,) = (r for r in records if r["task"] == task and r["metric"] == "top-1")
        assert shown == percent(found)


def test_accuracies_on_cifar10() -> None:
    found = json.loads((PAGE.with_suffix("") / "cifar10-byol.json").read_text())
    rows = table_rows(PAGE, TRAINED, "weights", "linear")
    for row, scores in zip(rows, (found["test"], found["test_8_bits"]), strict=True):
        for title, metric in COLUMNS.items():
            shown = row[title].replace("<br>", " ")
            assert shown == (percent(scores[metric]) if metric in scores else ""), title
    text = " ".join(PAGE.read_text().split())
    online, target = found["held_out"]["online"], found["held_out"]["target"]
    for metric, method in (("logistic top-1", "logistic regression"), ("kNN 20 top-1", "kNN")):
        both = " and ".join(f"{100 * each[metric]['value']:.2f}" for each in (online, target))
        assert f"{both} with {method}" in text
    rate = found["images_per_second_alone"]
    assert f"processed {rate:,} images per second: 500 epochs take 15 minutes" in text
    assert 500 * 50_000 / rate / 60 == pytest.approx(15, abs=0.5)
    assert f"for {found['seconds']['train'] / 60:.0f} minutes" in text


def test_accuracies_on_other_data() -> None:
    runs = json.loads((PAGE.with_suffix("") / "transfer.json").read_text())["runs"]
    rows = table_rows(PAGE, TRAINED, "encoder", "test images")
    assert len(rows) == len(runs) == 6
    for row, run in zip(rows, runs, strict=True):
        assert row["encoder"] == f"`{run['encoder']}`"
        assert (row["data"], row["test images"]) == (run["data"], f"{run['test_images']:,}")
        for title in ("logistic", "kNN, k = 20"):
            assert row[title] == percent(run["scores"][COLUMNS[title]])
