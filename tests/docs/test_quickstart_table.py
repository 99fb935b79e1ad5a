"""Quick-start tables of README and docs/results match the results of five seeds."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "2026-11-17-quickstart.md"
RUNS = json.loads((PAGE.with_suffix("") / "test-x86.json").read_text())["runs"]
PERCENT = ("linear", "kNN", "10 % of labels")


@pytest.mark.parametrize("document", [ROOT / "README.md", PAGE], ids=lambda path: path.name)
@pytest.mark.parametrize("method", ["SimCLR", "C-SimCLR"])
def test_table_shows_mean_and_range_of_five_seeds(document: Path, method: str) -> None:
    (line,) = re.findall(
        rf"^\| {method} \| [^\n]* to [^\n]* % \|[^\n]*", document.read_text(), re.M
    )
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    names = (*PERCENT, "reducible information", "Lipschitz")
    values = [run["values"] for run in RUNS if run["method"] == method.lower()]
    assert len(values) == 5
    for name, cell in zip(names, cells, strict=True):
        shown = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
        found = [(100 if name in PERCENT else 1) * each[name] for each in values if name in each]
        expected = [mean(found), min(found), max(found)] if found else []
        half_digit = (0.05 if name in PERCENT else 0.005) + 1e-9
        assert shown == pytest.approx(expected[: len(shown)], abs=half_digit), name
        assert bool(shown) == bool(found)
