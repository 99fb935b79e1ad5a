"""Tables of docs/results/2026-11-17-weights.md match the result file."""

import json
from pathlib import Path
from typing import Any

import pytest
from result_tables import table_rows, welch

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-17-weights.md"
RUNS = {
    run["name"]: run for run in json.loads((PAGE.with_suffix("") / "runs.json").read_text())["runs"]
}
DATA = {"Tiny-ImageNet-100": "tiny", "photographs": "photos"}
STARTS = {"bundled encoder": "weights", "random": "scratch", "no further training": "encoder"}
COLUMNS = {
    "logistic": "logistic top-1",
    "kNN 20": "kNN 20 top-1",
    "1 % of the labels": "few labels 1% top-1",
    "10 %": "few labels 10% top-1",
}
ROUNDING = 0.05 + 1e-9  # half of the last digit, and rounding in binary


def percent(run: dict[str, Any], metric: str) -> float:
    """Return a score of a run in percent."""
    return 100 * run["scores"][metric]["value"]


def test_accuracies() -> None:
    rows = table_rows(PAGE, "## Does continued pretraining pay", "start")
    assert len(rows) == 14
    for row in rows:
        seed = f"-s{row['seed']}" if row["seed"] else ""
        run = RUNS[f"{DATA[row['data']]}-{STARTS[row['start']]}{seed}"]
        assert run["data"] == row["data"]
        for title, metric in COLUMNS.items():
            assert (metric in run["scores"]) == bool(row[title])
            if row[title]:
                assert float(row[title]) == pytest.approx(percent(run, metric), abs=ROUNDING)
        if seed:
            assert float(row["seconds"]) == pytest.approx(run["seconds"]["train"], abs=0.5)


def test_differences() -> None:
    rows = table_rows(PAGE, "## Does continued pretraining pay", "difference")
    assert len(rows) == 6
    for row in rows:
        data, metric = DATA[row["data"]], COLUMNS[row["metric"]]
        ours, theirs = (
            [percent(RUNS[f"{data}-{start}-s{seed}"], metric) for seed in range(3)]
            for start in ("weights", "scratch")
        )
        shown = [float(row[title]) for title in ("difference", "low", "high")]
        assert shown == pytest.approx(welch(ours, theirs)[:3], abs=ROUNDING)


def test_fine_tuning() -> None:
    rows = table_rows(PAGE, "## Fine-tuning", "fine-tuned")
    assert len(rows) == 6
    for row in rows:
        share = row["labels"].split()[0]
        run = RUNS[f"finetune-{share}-s{row['seed']}"]
        assert float(row["chosen learning rate"]) == run["chosen"]["chosen"]
        score = run["scores"][f"finetune {share}% top-1"]
        shown = [float(word.strip("[],")) for word in row["fine-tuned"].split()]
        expected = [100 * score[name] for name in ("value", "low", "high")]
        assert shown == pytest.approx(expected, abs=ROUNDING)
