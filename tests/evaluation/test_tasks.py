"""The list of tasks is complete, is readable without torch, and declares every metric."""

import subprocess
import sys
from pathlib import Path

import pytest

from compressive.evaluation import tasks
from compressive.evaluation.tasks import SUITES, TASKS, select_tasks


def test_suites_hold_these_tasks_in_this_order() -> None:
    quick = ("logistic", "knn", "few-label", "geometry")
    standard = ("linear", *quick, "corruptions", "smoothness", "information", "gallery")
    assert select_tasks("quick") == quick
    assert select_tasks("standard") == standard
    assert select_tasks("paper") == (*standard, "transfer", "robustness") == tuple(TASKS)


def test_every_task_file_is_listed_and_has_a_function() -> None:
    files = {path.stem for path in Path(tasks.__file__).parent.glob("*.py")}
    assert files - {"__init__", "tsne"} == {task.module for task in TASKS.values()}
    assert all(callable(task.load()) for task in TASKS.values())


def test_selected_tasks_run_in_the_order_of_the_list_and_own_tasks_run_last() -> None:
    assert select_tasks("quick", ["knn", "own", "linear"], ["own"]) == ("linear", "knn", "own")
    assert select_tasks("quick", (), ["own"])[-1] == "own"
    with pytest.raises(ValueError, match=r"suite .*quick, standard, paper, got 'all'"):
        select_tasks("all")
    with pytest.raises(ValueError, match=r"--tasks .*linear.*, got 'liner'"):
        select_tasks("quick", ["liner"])


def test_the_list_needs_no_torch() -> None:
    code = "import sys, compressive.evaluation.tasks, compressive.metric_info; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(SUITES) == {suite for task in TASKS.values() for suite in task.suites}
