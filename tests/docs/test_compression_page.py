"""The table of evidence in docs/compression.md agrees with the pages of results."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest
from result_tables import table_rows, welch

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "compression.md"
CIFAR10 = DOCS / "results" / "2026-11-15-cifar10.md"
FINAL = DOCS / "results" / "2026-11-17-compression"
# Each column: the row of a table on the CIFAR-10 page, and the metric in the result file.
COLUMNS = {
    "logistic": ("logistic regression, top-1 (central crops)", "logistic top-1"),
    "kNN 20": ("kNN, k = 20", "kNN 20 top-1"),
    "1 %": ("1 % of the labels", "few labels 1% top-1"),
    "corruptions": ("corruptions, mean of 14 types x 5", "corruptions top-1"),
}
SECTIONS = {
    "C-SimCLR, kappa_b 10, beta 1": "## At the paper's temperature",
    "C-SimCLR, kappa_b 5, beta 0.3": "## At kappa_b = 5, the recipes",
    "C-BYOL, beta 0.01": "## BYOL and C-BYOL: 200 epochs",
}
# (result file, runs of the method, runs of the method that it is compared with)
_TINY = "Tiny-ImageNet-100, 80", "final-tiny-imagenet-100.json"
_CIFAR10 = "CIFAR-10, 80", "final-cifar10.json"
RUNS = {
    (data, method): (file, ours, theirs)
    for (data, file), method, ours, theirs in (
        (_CIFAR10, "adaptive C-SimCLR, kappa_b 5, beta 3", "adaptive-k5-b3", "simclr-k5"),
        (_CIFAR10, "adaptive C-SimCLR, kappa_b 7, beta 3", "adaptive-k7-b3", "simclr-k5"),
        (_CIFAR10, "late C-SimCLR, kappa_b 7, beta 1", "cifar-cosine-k7-b1", "simclr-k5"),
        (_TINY, "adaptive C-SimCLR, kappa_b 7, beta 3", "adaptive-k7-b3", "simclr-k7"),
        (_TINY, "adaptive C-SimCLR, kappa_b 10, beta 1", "adaptive-k10-b1", "simclr-k7"),
        (_TINY, "adaptive C-SimCLR, kappa_b 5, beta 3", "adaptive-k5-b3", "simclr-k7"),
        (_TINY, "late C-SimCLR, kappa_b 7, beta 0.3", "cosine-k7-b0.3", "simclr-k7"),
        (_TINY, "C-SimCLR, kappa_b 10, beta 0.3", "constant-k10-b0.3", "simclr-k7"),
    )
}
ROWS = {  # without the line breaks before intervals
    (row["data, epochs"], row["method"]): {k: v.replace("<br>", " ") for k, v in row.items()}
    for row in table_rows(PAGE, "## Evidence", "smoother directions")
}


def test_all_rows_are_checked() -> None:
    assert ROWS.keys() == {*(("CIFAR-10, 200", method) for method in SECTIONS), *RUNS}


@pytest.mark.parametrize("method", SECTIONS)
def test_rows_of_cifar10_repeat_its_page(method: str) -> None:
    rows = table_rows(CIFAR10, SECTIONS[method], "difference, 95 % over seeds")
    first = "% unless stated otherwise"
    differences = {row[first]: row["difference, 95 % over seeds"] for row in rows}
    for column, (name, _) in COLUMNS.items():
        assert ROWS["CIFAR-10, 200", method][column] == differences[name], column


@pytest.mark.parametrize("row", RUNS)
def test_rows_of_final_comparisons_match_their_files(row: tuple[str, str]) -> None:
    file, *names = RUNS[row]
    files = file, "late-compression.json"
    runs = {run["name"]: run for f in files for run in json.loads((FINAL / f).read_text())["runs"]}
    ours, theirs = ([runs[f"{name}-s{seed}"] for seed in range(3)] for name in names)
    for column, (_, metric) in COLUMNS.items():
        values = ([100 * run["test"][metric]["value"] for run in group] for group in (ours, theirs))
        *expected, _p = welch(*values)
        cell = ROWS[row][column]
        shown = [float(number) for number in re.findall(r"-?\d+\.\d", cell)]
        assert shown == pytest.approx(expected, abs=0.05 + 1e-9), column  # half of the last digit
        assert cell.startswith("**") == (expected[1] * expected[2] > 0), column
    directions = [name for name in ours[0]["smoothness"] if re.search(r"[+-] lipschitz$", name)]
    smoother = [
        mean(run["smoothness"][name] for run in ours)
        < mean(run["smoothness"][name] for run in theirs)
        for name in directions
    ]
    assert ROWS[row]["smoother directions"] == f"{sum(smoother)} of {len(smoother)}"


def test_results_of_the_adaptive_rule_repeat_the_final_comparisons() -> None:
    rows = table_rows(PAGE, "## Adaptive beta", "smoother")
    assert len(rows) == 5
    for row in rows:
        kappa_b, beta = re.findall(r"\d+", row["kappa_b, beta"])
        key = f"{row['data']}, 80", f"adaptive C-SimCLR, kappa_b {kappa_b}, beta {beta}"
        assert row["accuracy with all labels"] == ROWS[key]["logistic"].strip("*")
        assert row["with 1 %"] == ROWS[key]["1 %"].strip("*")
        file, *names = RUNS[key]
        runs = {run["name"]: run for run in json.loads((FINAL / file).read_text())["runs"]}
        ours, theirs = (
            mean(
                value
                for seed in range(3)
                for direction, value in runs[f"{name}-s{seed}"]["smoothness"].items()
                if re.search(r"[+-] lipschitz$", direction)
            )
            for name in names
        )
        assert row["smoother"].strip("*") == f"{theirs / ours:.2f}"


def test_lengths_of_training_repeat_their_page() -> None:
    """Rows of the short table equal those of the page of results, cell for cell."""
    titles = {"1 %": "1 % of the labels", "times smoother": "smoother"}
    results = table_rows(FINAL.with_suffix(".md"), "## Length of training", "smoother")
    by_run = {(row["images"], row["epochs"], row["method"], row["beta"]): row for row in results}
    assert len(by_run) == len(results)
    rows = table_rows(PAGE, "## Evidence", "times smoother")
    assert len(rows) == 6
    for row in rows:
        method, beta = row["method"].split(", beta ")
        kinds = {"adaptive C-SimCLR": "adaptive", "late C-SimCLR": "cosine"}
        kind = kinds.get(method, "constant")
        found = by_run[row["images"], row["epochs"], kind, beta]
        for title in ("logistic", "kNN 20", "1 %", "corruptions", "times smoother"):
            assert row[title] == found[titles.get(title, title)], (row, title)
