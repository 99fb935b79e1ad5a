"""The table of docs/export.md matches the measured differences."""

import json
import re
from pathlib import Path

import pytest

from compressive.exporting.formats import EXPORT_FORMATS

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = json.loads((DOCS / "results/2026-11-17-export/parity.json").read_text())["sources"]
TABLE = (DOCS / "export.md").read_text().partition("## Measured differences")[2]
ROWS = {
    cells[0].strip(" `"): [cell.strip() for cell in cells[1:]]
    for line in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)
    if len(cells := line.split(" | ")) > 2
}
COLUMNS = [*EXPORT_FORMATS, "onnx, with preprocessing", "onnx, half"]


def test_table_has_a_row_for_each_source_and_a_column_for_each_format() -> None:
    assert list(ROWS) == ["encoder", *SOURCES]
    assert ROWS["encoder"] == COLUMNS


@pytest.mark.parametrize("source", SOURCES)
def test_table_shows_the_measured_differences(source: str) -> None:
    for column, shown in zip(COLUMNS, ROWS[source], strict=True):
        found = SOURCES[source][column]
        exact = "refused" if "refused" in found else f"{found['largest_difference']:.1e}"
        assert shown == exact, column
        if "refused" not in found:
            assert found["largest_difference"] <= found["tolerance"]
