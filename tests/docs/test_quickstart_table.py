"""Quick-start tables of README and docs/results match the results of five seeds."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from result_tables import table_rows
from scipy.stats import ttest_ind

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
OLD, ARM = ("2026-11-17-quickstart/test-x86.json", "2026-11-18-quickstart/test-arm.json")
NEW = "2026-11-18-quickstart/test-x86.json"
PAGE = RESULTS / "2026-11-18-quickstart.md"
PLACES = {  # document and heading of its section: file of the runs
    (ROOT / "README.md", "Try it"): NEW,
    (PAGE, "Five seeds, test images"): NEW,
    (PAGE, "Two epochs, test images"): ARM,
    (RESULTS / "2026-11-17-quickstart.md", "Test images on another machine"): OLD,
}
PERCENT = ("linear", "kNN", "1 % of labels", "10 % of labels", "corrupted")
COLUMNS = (*PERCENT, "reducible information", "Lipschitz")


def read_runs(file: str) -> dict[str, list[dict[str, float]]]:
    """Return the values of each seed by method."""
    runs: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["runs"]
    found = {
        method: [run["values"] for run in runs if run["method"] == method]
        for method in ("simclr", "c-simclr")
    }
    assert [len(values) for values in found.values()] == [5, 5]
    return found


def read_table(document: Path, heading: str) -> dict[str, dict[str, str]]:
    """Return the cells of the first table of a section, by row and column."""
    section = document.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names = [next(name for name in COLUMNS if cell.startswith(name)) for cell in header[1:]]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", cell)]


def in_units(name: str, values: list[dict[str, float]]) -> list[float]:
    """Return the values of a column, accuracies in percent."""
    return [(100 if name in PERCENT else 1) * each[name] for each in values if name in each]


def half_digit(name: str) -> float:
    return (0.05 if name in PERCENT else 0.005) + 1e-9


@pytest.mark.parametrize(("place", "file"), PLACES.items(), ids=lambda each: str(each)[-30:])
def test_tables_show_mean_and_range_of_five_seeds(place: tuple[Path, str], file: str) -> None:
    rows = read_table(*place)
    for method, values in read_runs(file).items():
        row = rows[{"simclr": "SimCLR", "c-simclr": "C-SimCLR"}[method]]
        for name, cell in row.items():
            found, shown = in_units(name, values), numbers(cell)
            expected = [mean(found), min(found), max(found)] if found else []
            # The older table has means without a range.
            expected = expected[: len(shown)] if file == OLD else expected
            assert shown == pytest.approx(expected, abs=half_digit(name)), (method, name)
            assert bool(shown) == bool(found)


def test_readme_shows_accuracy_robustness_information_and_smoothness() -> None:
    shown = set(read_table(ROOT / "README.md", "Try it")["SimCLR"])
    assert {"linear", "corrupted", "reducible information", "Lipschitz"} <= shown


@pytest.mark.parametrize(
    ("heading", "file"), [("Five seeds, test images", NEW), ("Two epochs, test images", ARM)]
)
def test_differences_have_welch_intervals(heading: str, file: str) -> None:
    row = read_table(PAGE, heading)["difference"]
    simclr, compressed = read_runs(file).values()
    for name, cell in row.items():
        pair = in_units(name, compressed), in_units(name, simclr)
        if not all(pair):
            assert not cell
            continue
        bounds = ttest_ind(*pair, equal_var=False).confidence_interval()
        expected = [mean(pair[0]) - mean(pair[1]), bounds.low, bounds.high]
        assert numbers(cell) == pytest.approx(expected, abs=half_digit(name)), name


def test_search_shows_all_runs_on_held_out_images() -> None:
    runs = json.loads((PAGE.with_suffix("") / "search-x86.json").read_text())["runs"]
    rows = table_rows(PAGE, "## Three epochs", "rise")
    assert sum(int(row["seeds"]) for row in rows) == len(runs)
    for row in rows:
        wanted = {"train.epochs": row["epochs"], "bottleneck.kappa_b": row["kappa_b"]}
        wanted |= {"bottleneck.beta": row["beta"]} if row["beta"] else {}
        wanted |= {"bottleneck.warmup_epochs": row["rise"]} if row["rise"] not in ("", "0") else {}
        recipe = f"{row['method'].lower()}/quickstart"
        found = [
            run["values"]
            for run in runs
            if run["recipe"] == recipe and {k: str(v) for k, v in run["set"].items()} == wanted
        ]
        assert len(found) == int(row["seeds"])
        linear = in_units("linear", found)
        expected = [mean(linear), min(linear), max(linear)]
        assert numbers(row["linear"]) == pytest.approx(expected, abs=half_digit("linear"))
        for name in ("kNN", "10 % of labels", "Lipschitz"):
            shown = float(row[name])
            assert shown == pytest.approx(mean(in_units(name, found)), abs=half_digit(name))
