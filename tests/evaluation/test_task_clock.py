"""Seconds of tasks: parts inside others count once."""

from pathlib import Path

import pytest
from rich.console import Console

from compressive.evaluation.results import Results, read
from compressive.evaluation.results_table import results_table
from compressive.evaluation.task_clock import TaskClock


def test_parts_inside_a_task_count_once() -> None:
    now = [0.0]
    clock = TaskClock(lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    with clock.measure("linear"):
        wait(1)
        with clock.measure("features"):
            wait(10)
            with clock.measure("decode"):
                wait(100)
        wait(2)
        with clock.measure("features"):
            wait(20)

    def skip() -> None:
        with clock.measure("knn"):
            wait(5)
            raise ValueError("skipped")

    with pytest.raises(ValueError, match="skipped"):
        skip()
    assert clock.seconds == {"decode": 100, "features": 30, "linear": 3, "knn": 5}
    assert sum(clock.seconds.values()) == now[0]


def test_table_and_file_show_seconds(tmp_path: Path) -> None:
    results = Results("a run", command="x")
    results.add("kNN 20", "set", "top-1", 0.5, n=10, protocol={})

    def shown(found: Results) -> str:
        console = Console(width=120, record=True, quiet=False)
        with console.capture() as text:
            console.print(results_table(found))
        return text.get()

    assert "seconds" not in shown(results)
    results.about["seconds"] = {"features": 3.25, "knn": 0.1}
    results.write(tmp_path)
    found = read(tmp_path)
    assert found.seconds == {"features": 3.25, "knn": 0.1}
    assert "seconds: features 3.2, knn 0.1" in shown(found)
    results.about["seconds"] = "damaged"
    assert "seconds" not in shown(results)
