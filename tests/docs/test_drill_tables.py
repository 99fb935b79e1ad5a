"""The tables of the failure drills and of elastic runs show what their JSON files hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from result_tables import table_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "results" / "2026-11-18-drills.md"
FOLDER = DOCS / "results" / "2026-11-18-drills"
DRILLS: dict[str, Any] = json.loads((FOLDER / "drills.json").read_text())
ELASTIC: dict[str, Any] = json.loads((FOLDER / "elastic.json").read_text())


def test_table_of_drills_equals_the_json() -> None:
    rows = table_rows(PAGE, "## Drills", "tried", "survived")
    assert len(rows) == len(DRILLS["drills"]) == 9
    for row, drill in zip(rows, DRILLS["drills"].values(), strict=True):
        assert row["tried"] == drill["tried"]
        assert row["survived"].startswith("yes" if drill["survived"] else "no")
        assert row["seconds to detection"] == f"{drill['seconds_to_detection']:.1f}"
        assert row["steps lost"] == str(drill["steps_lost"])
        after = drill.get("seconds_to_next_step")
        assert row["seconds to the next steps"] == ("" if after is None else f"{after:.0f}")


def test_every_message_names_the_rank() -> None:
    for name, drill in DRILLS["drills"].items():
        if "rank" in name:
            assert f"rank {name[-1]} on HOST" in drill["message"], name


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("microseconds_per_collective", "takes {} microseconds"),
        ("microseconds_per_step_of_resnet50", "{} microseconds for all"),
        ("microseconds_per_exchange", "({} microseconds)"),
    ],
)
def test_overhead_equals_the_json(name: str, word: str) -> None:
    text = " ".join((DOCS / "drills.md").read_text().split())
    assert word.format(f"{DRILLS['overhead'][name]:.3g}") in text


def test_deviations_equal_the_json() -> None:
    rows = table_rows(DOCS / "elastic.md", "## What stays equal", "processes", "steps")
    parts = ELASTIC["changing_against_one"]["parts"]
    assert [part["processes"] for part in parts] == [1, 2, 4, 1]
    for row, part in zip(rows, parts, strict=True):
        assert row["processes"] == str(part["processes"])
        assert row["steps"] == "{} to {}".format(*part["steps"])
        most = part["max_relative"]
        assert row["largest relative deviation of the loss"] == (f"{most:.1e}" if most else "0")


def test_resumed_run_is_bitwise_equal_in_the_json() -> None:
    same = ELASTIC["two_stopped_and_resumed_against_two"]
    assert same["weights_are_bitwise_equal"] is True
    assert [part["max_relative"] for part in same["parts"]] == [0.0, 0.0]
