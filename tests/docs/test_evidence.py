"""Figures in docs/comparison.md and docs/results match the result files, computed with scipy."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "2026-11-15-cifar10.md"
FOLDER = PAGE.with_suffix("")
NAMES = {
    "kappa10": ("simclr", "c-simclr"),
    "kappa5": ("simclr", "c-simclr"),
    "byol-200": ("byol", "c-byol"),
}
HEADINGS = {
    "kappa10": "## At the paper's temperature: 200 epochs, three seeds, test images",
    "kappa5": "## At kappa_b = 5, the recipes: 200 epochs, three seeds, test images",
    "byol-200": "## BYOL and C-BYOL: 200 epochs, three seeds, test images",
}
# Table row: task and metric of its records.
ROWS = {
    "linear, top-1 (crops and flips)": ("linear", "top-1"),
    "linear, Brier x 100": ("linear", "brier"),
    "linear, ECE": ("linear", "ece"),
    "logistic regression, top-1 (central crops)": ("logistic", "top-1"),
    "logistic regression, Brier x 100": ("logistic", "brier"),
    "logistic regression, ECE": ("logistic", "ece"),
    "kNN, k = 20": ("kNN 20", "top-1"),
    "1 % of the labels": ("few labels 1%", "top-1"),
    "10 % of the labels": ("few labels 10%", "top-1"),
    "corruptions, mean of 14 types x 5": ("corruptions", "top-1"),
}
DIRECTIONS = {
    "local Lipschitz estimate, test, brightness + / -": "brightness",
    **{f"{name} + / -": name for name in ("contrast", "saturation", "hue")},
}
COLUMNS = {
    "linear": ("linear", "top-1"),
    "Brier x 100": ("linear", "brier"),
    "kNN": ("kNN 20", "top-1"),
    "1 % of the labels": ("few labels 1%", "top-1"),
    "14 corruptions": ("corruptions", "top-1"),
}


def values(group: str, name: str, task: str, metric: str) -> list[float]:
    """Return a figure of all seeds on test images: fractions times 100, smoothness as is."""
    found: list[float] = []
    for seed in range(3):
        path = FOLDER / group / f"{name}-seed{seed}" / "evaluation" / "results.json"
        records: list[Any] = json.loads(path.read_text())["records"]
        named = [r for r in records if (r["task"], r["metric"]) == (task, metric)]
        found += [r["value"] for r in named if not r["dataset"].endswith(" train")]
    assert len(found) == 3
    return [value if metric == "lipschitz" else 100 * value for value in found]


def difference(first: list[float], second: list[float]) -> list[float]:
    """Return the difference of the means and Welch's confidence interval."""
    interval = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    return [mean(second) - mean(first), float(interval.low), float(interval.high)]


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table below a heading, by their first cells."""
    lines = text.split(heading, 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


def assert_shown(cell: str, expected: list[float]) -> None:
    """Compare to the last digit shown; halves round either way. Bold if the interval excludes 0."""
    shown = re.findall(r"-?\d+\.\d+", cell)
    assert len(shown) == len(expected), cell
    for text, value in zip(shown, expected, strict=True):
        assert abs(float(text) - value) < 0.501 * 10 ** -len(text.partition(".")[2]), cell
    if cell.count("[") == 1:
        assert cell.startswith("**") == (expected[1] > 0 or expected[2] < 0), cell


@pytest.mark.parametrize("group", NAMES)
def test_three_seed_tables_match_the_results(group: str) -> None:
    table = rows(PAGE.read_text(), HEADINGS[group])
    for label, (task, metric) in ROWS.items():
        first, second = (values(group, name, task, metric) for name in NAMES[group])
        expected = first, second, difference(first, second)
        for cell, figures in zip(table[label][:3], expected, strict=True):
            assert_shown(cell, figures)
    for label, direction in DIRECTIONS.items():
        *means, less = table[label][:3]
        for sign, bold in zip("+-", less.split(", ")[:2], strict=True):
            pair = [
                values(group, each, f"smoothness {direction}{sign}", "lipschitz")
                for each in NAMES[group]
            ]
            for cell, seeds in zip(means, pair, strict=True):
                assert_shown(cell.split(" / ")["+-".index(sign)], [mean(seeds)])
            expected = difference(*pair)
            assert_shown(bold, expected[:1])
            assert bold.startswith("**") == (expected[1] > 0 or expected[2] < 0), label


@pytest.mark.parametrize(
    ("group", "labels"),
    [
        ("kappa10", ("kappa_b = 10: SimCLR", "C-SimCLR (beta 1)")),
        ("kappa5", ("kappa_b = 5: SimCLR", "C-SimCLR (beta 0.3)")),
        ("byol-200", ("BYOL", "C-BYOL")),
    ],
)
def test_comparison_table_matches_the_results(group: str, labels: tuple[str, str]) -> None:
    text = (ROOT / "docs" / "comparison.md").read_text().split("| | linear | Brier x 100 |", 1)[1]
    head = ["", "linear", "Brier x 100", *re.split(r" \| ", text.splitlines()[0].strip(" |"))]
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:11]]
    start = next(i for i, line in enumerate(lines) if line[0].startswith(labels[0]))
    plain, compressed, less = lines[start : start + 3]
    assert (compressed[0].split(" (")[0], less[0]) == (labels[1].split(" (")[0], "difference")
    for name, (task, metric) in COLUMNS.items():
        place = head.index(name)
        first, second = (values(group, each, task, metric) for each in NAMES[group])
        assert_shown(plain[place], [mean(first)])
        assert_shown(compressed[place], [mean(second)])
        assert_shown(less[place], difference(first, second))


@pytest.mark.parametrize("group", NAMES)
def test_claims_table_matches_the_results(group: str) -> None:
    """The first table of the page has a column for each group."""
    column = {"kappa10": 1, "kappa5": 2, "byol-200": 3}[group]
    table = rows(PAGE.read_text(), "# The paper's claims on CIFAR-10")
    claims = {
        "linear top-1 higher": [("linear", "top-1"), ("logistic", "top-1")],
        "Brier lower": [("linear", "brier")],
        "1 % of the labels": [("few labels 1%", "top-1")],
        "corruptions": [("corruptions", "top-1")],
    }
    for label, figures in claims.items():
        expected: list[float] = []
        for task, metric in figures:
            expected += difference(*(values(group, name, task, metric) for name in NAMES[group]))
        assert_shown(table[label][column], expected)


COLLAPSED = ""  # nothing to evaluate
# Tables of runs with one seed: their headings, and the file of each row.
SEARCHES = {
    "## Beta, 200 epochs, one seed, by held-out labels": [
        *("held-out-simclr", "held-out-beta0", "held-out-beta0.1", "held-out-beta0.1-closed"),
        *("held-out-beta0.3", "held-out-beta1", "held-out-beta0.3-decay5e-4"),
    ],
    "## Where compression gains: the temperature (100 epochs, one seed, held-out labels)": [
        *("search/simclr-kappa_b10", "search/kappa_b10-beta0", "search/kappa_b10-beta0.3"),
        *(
            "search/kappa_b10-beta1",
            "search/kappa_b10-beta3",
            COLLAPSED,
            "search/simclr",
            "search/beta0.3",
        ),
        *("search/beta0.3-kappa_e4096", "search/simclr-decay5e-4", "search/beta0.3-decay5e-4"),
        "search/simclr-kappa_b3",
    ],
    "## Learning rate and dimension: SimCLR and C-SimCLR (60 epochs, one seed, held-out labels)": [
        *(f"search-60/simclr-lr{rate}" for rate in (0.1, 0.2, 0.4, 0.8)),
        "search-60/simclr-64-axes",
        *(f"search-60/c-simclr-lr{rate}" for rate in (0.2, 0.4, 0.8)),
        "search-60/c-simclr-64-axes",
    ],
    "## Learning rate, 200 epochs, one seed": [
        *("held-out-simclr", "held-out-simclr-lr0.4"),
        *("held-out-beta0.3", "held-out-c-simclr-lr0.4"),
    ],
    "## BYOL and C-BYOL (100 epochs, one seed, held-out labels)": [
        *("search/byol-sgd", "search/c-byol-beta0", "search/c-byol-beta0.01"),
        *("search/c-byol-beta0.1", "search/c-byol-beta1", "search/byol-lr0.24"),
        *("search/c-byol-lr0.24-beta0.01", "search/c-byol-lr0.24-kappa_e1024"),
        *("search/c-byol-lr0.24-kappa_e256", "search/c-byol-lr0.24-other-view"),
    ],
}
SEARCHED = {
    "logistic": ("logistic", "top-1"),
    "Brier": ("logistic", "brier"),
    "kNN": ("kNN 20", "top-1"),
    "1 %": ("few labels 1%", "top-1"),
    "10 %": ("few labels 10%", "top-1"),
}


@pytest.mark.parametrize("heading", SEARCHES)
def test_search_tables_match_the_results(heading: str) -> None:
    text = PAGE.read_text().split(heading + "\n", 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    head, _, *lines = [re.split(r" *(?<!\\)\| *", line) for line in text.splitlines()]
    for line, name in zip(lines, SEARCHES[heading], strict=True):
        if name == COLLAPSED:
            assert line[head.index("logistic") + 1] == "collapse"
            continue
        records: list[Any] = json.loads((FOLDER / f"{name}.json").read_text())["records"]
        found = {(r["task"], r["metric"]): 100 * r["value"] for r in records}
        for column, key in SEARCHED.items():
            # Rows start with a bar, which was removed from the header.
            assert_shown(line[head.index(column) + 1], [found[key]])
