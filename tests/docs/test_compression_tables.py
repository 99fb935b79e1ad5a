"""Tables of docs/results/2026-11-17-compression.md match the result files."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from result_tables import table_rows, welch

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-17-compression.md"
FOLDER = PAGE.with_suffix("")
COLUMNS = {
    "logistic": "logistic top-1",
    "kNN 20": "kNN 20 top-1",
    "1 % of the labels": "few labels 1% top-1",
    "10 %": "few labels 10% top-1",
    "corruptions": "corruptions top-1",
}
# Heading of the section, its file, and its number of table rows.
SECTIONS = {
    "## Search on Tiny-ImageNet-100": ("search-tiny-imagenet-100.json", 12),
    "## Second search": ("search-2-tiny-imagenet-100.json", 12),
    "## Third search": ("search-3-tiny-imagenet-100.json", 6),
    "## Final comparison": ("final-tiny-imagenet-100.json", 10),
    "## Search on CIFAR-10": ("search-cifar10.json", 6),
}


def run_key(run: dict[str, Any]) -> tuple[str, ...]:
    """Return (method, kappa_b, beta, kappa_e, p_i, seed) of a run in a result file."""
    if "mode" in run:  # the first search
        beta = f"{run['beta']:g}" if run["mode"] in ("constant", "adaptive") else ""
        return run["mode"], f"{run['kappa_b']:g}", beta, "", "", str(run["seed"])
    settings = run["settings"]
    method = settings.get("method", settings["recipe"].split("/")[0])
    is_adaptive = settings.get("bottleneck.schedule") == "adaptive"
    weight = settings.get("bottleneck.adaptive_weight", "")
    if method == "c-byol":
        method = "c-byol, adaptive"
    elif is_adaptive:
        method = "adaptive"
    elif method == "c-simclr":
        method = "constant"
    names = ("bottleneck.kappa_b", "bottleneck.beta", "bottleneck.kappa_e")
    kappa_b, beta, kappa_e = (settings.get(name, "") for name in names)
    return method, kappa_b, beta, kappa_e, weight, settings["seed"]


def row_key(row: dict[str, str]) -> tuple[str, ...]:
    """Return the same key of a table row."""
    weights = {"": "", "exp(-nll_i)": "likelihood", "rank of nll_i": "rank"}
    kappa_e = row.get("kappa_e", "").replace("1024", "")  # the default
    names = (row["method"], row.get("kappa_b", ""), row["beta"])
    return *names, kappa_e, weights[row.get("weight p_i", "")], row["seed"]


@pytest.mark.parametrize("heading", SECTIONS)
def test_tables_match_result_files(heading: str) -> None:
    name, count = SECTIONS[heading]
    runs = json.loads((FOLDER / name).read_text())["runs"]
    by_key = {run_key(run): run for run in runs if "held_out" in run or "test" in run}
    rows = table_rows(PAGE, heading, "seed", "logistic")
    assert len(rows) == len(by_key) == count
    for row in rows:
        run = by_key[row_key(row)]
        assert {"logistic", "kNN 20", "1 % of the labels", "10 %"} <= row.keys()
        for title, metric in COLUMNS.items():
            if title not in row:
                continue
            value = (run.get("held_out") or run["test"])[metric]
            value = value["value"] if isinstance(value, dict) else value
            # Half of the last digit, and rounding in binary.
            assert float(row[title]) == pytest.approx(100 * value, abs=0.05 + 1e-9), (row, title)
        if "Lipschitz" in row:
            assert float(row["Lipschitz"]) == pytest.approx(lipschitz(run), abs=0.005 + 1e-9)


def lipschitz(run: dict[str, Any], group: str = "smoothness") -> float:
    """Return the mean of the estimates in the eight directions."""
    ends = ("+ lipschitz", "- lipschitz")
    estimates = [value for name, value in run[group].items() if name.endswith(ends)]
    assert len(estimates) == 8
    return mean(estimates)


def cifar10_runs() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the CIFAR-10 runs with the chosen settings by method and seed."""
    runs = json.loads((FOLDER / "search-cifar10.json").read_text())["runs"]
    chosen = ("simclr-k5-s", "adaptive-k5-b3-s", "dcl-k5-s")
    runs = [run for run in runs if run["name"].startswith(chosen)]
    return {(run["name"].split("-")[0], run["settings"]["seed"]): run for run in runs}


def test_cifar10_on_test_images() -> None:
    rows = table_rows(PAGE, "## Search on CIFAR-10", "linear")
    assert [row["method"] for row in rows] == ["adaptive", "dcl"]
    for row in rows:
        run = cifar10_runs()[row["method"], "0"]
        for title, metric in {**COLUMNS, "linear": "linear top-1"}.items():
            value = 100 * run["test"][metric]["value"]
            assert float(row[title]) == pytest.approx(value, abs=0.05 + 1e-9), (row, title)
        value = lipschitz(run, "test_smoothness")
        assert float(row["Lipschitz"]) == pytest.approx(value, abs=0.005 + 1e-9)


def test_cifar10_online_accuracy() -> None:
    steps = {"60 epochs": "5859", "80 epochs": "7813"}
    rows = table_rows(PAGE, "## Search on CIFAR-10", "probe, 60 epochs")
    assert len(rows) == len(cifar10_runs()) == 9
    for row in rows:
        online = cifar10_runs()[row["method"], row["seed"]]["online"]
        for when, step in steps.items():
            if step not in online:
                assert row[f"probe, {when}"] == row[f"kNN, {when}"] == ""
                continue
            for title, metric in {"probe": "probe", "kNN": "knn"}.items():
                value = 100 * online[step][metric]
                assert float(row[f"{title}, {when}"]) == pytest.approx(value, abs=0.05 + 1e-9)


def test_differences_of_the_final_comparison() -> None:
    runs = json.loads((FOLDER / "final-tiny-imagenet-100.json").read_text())["runs"]
    by_name = {run["name"]: run for run in runs}
    rows = table_rows(PAGE, "## Final comparison", "Holm")
    assert len(rows) == 12
    found = []
    for row in rows:
        name = {"adaptive": "adaptive-k10-b1", "constant": "constant-k10-b0.3"}[row["comparison"]]
        ours, theirs = (
            [
                lipschitz(run)
                if row["metric"] == "Lipschitz"
                else 100 * run["test"][COLUMNS[row["metric"]]]["value"]
                for run in (by_name[f"{which}-s{seed}"] for seed in range(3))
            ]
            for which in (name, "simclr-k7")
        )
        found.append(welch(ours, theirs))
        shown = [float(row[title]) for title in ("difference", "low", "high")]
        assert shown == pytest.approx(found[-1][:3], abs=0.005 + 1e-9)
        assert float(row["p"]) == pytest.approx(found[-1][3], abs=0.0005 + 1e-9)
    p = [each[3] for each in found]
    for row, value in zip(rows, p, strict=True):
        # Holm: the largest p_j (m - rank of j) over all p_j up to this one, at most 1.
        smaller = [other for other in p if other <= value]
        steps = [other * (len(p) - sum(q < other for q in p)) for other in smaller]
        assert float(row["Holm"]) == pytest.approx(min(1, max(steps)), abs=0.005 + 1e-9)
