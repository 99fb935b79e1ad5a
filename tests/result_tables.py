"""Read the tables of a page in docs/results, and compute what they show from result files."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from scipy import stats


def table_rows(page: Path, heading: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of all tables in a section that have these columns, by column title."""
    section = page.read_text().split(f"\n{heading}")[1].split("\n## ")[0]
    rows: list[dict[str, str]] = []
    titles: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells
        elif not set(line) <= set("|-: ") and set(columns) <= set(titles):
            rows.append(dict(zip(titles, cells, strict=True)))
    return rows


def welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the difference of two means, its 95 % Welch interval and the p-value."""
    found = stats.ttest_ind(ours, theirs, equal_var=False)
    interval = found.confidence_interval(0.95)
    p = found.pvalue  # pyright: ignore[reportAttributeAccessIssue]
    return mean(ours) - mean(theirs), interval.low, interval.high, p
