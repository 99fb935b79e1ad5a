"""Print which tests were deselected or skipped by marker, how many, and why.

conftest.py imports the hooks below. Under xdist the workers deselect tests; each sends its counts
to the controller, which prints them.
"""

from collections import Counter
from typing import Any

import pytest

DESELECTED = {
    "shared": "need ../shared/data; run with -m shared",
    "stress": "take minutes; run with -m stress",
    "slow": "run with -m slow",
}
SKIPPED = ("gpu", "browser")
COUNTS = pytest.StashKey[Counter[str]]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        name = next((name for name in DESELECTED if name in marks), "")
        item.config.stash.setdefault(COUNTS, Counter())[name] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = dict(session.config.stash.get(COUNTS, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    # Every worker collects all tests, so their counts are equal.
    counts = getattr(node, "workeroutput", {}).get("deselected", {})
    node.config.stash[COUNTS] = Counter(counts) | node.config.stash.get(COUNTS, Counter())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    selection = f"-m {config.option.markexpr!r} -k {config.option.keyword!r}"
    deselected = {
        (name, DESELECTED.get(name, selection)): count
        for name, count in config.stash.get(COUNTS, Counter()).items()
    }
    skipped = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for what, counts in (("deselected", deselected), ("skipped", skipped)):
        parts = [f"{k} {name or 'other'} ({why})" for (name, why), k in sorted(counts.items())]
        if parts:
            terminalreporter.write_line(f"{what}: {', '.join(parts)}")


def skip_reason(report: Any) -> tuple[str, str]:
    """Return the marker of a skipped test and the reason of the skip."""
    name = next((name for name in SKIPPED if name in report.keywords), "")
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return name, why.removeprefix("Skipped: ")
