"""The task registry is complete, imports without torch, and declares every metric."""

import subprocess
import sys
from pathlib import Path

import pytest

from compressive.evaluation import tasks
from compressive.evaluation.tasks import SUITES, TASKS, select_tasks


def test_suites_contain_these_tasks_in_order() -> None:
    quick = ("logistic", "knn", "few-label", "geometry")
    measured = "corruptions", "smoothness", "invariance", "information"
    standard = ("linear", *quick, *measured, "gallery")
    assert select_tasks("quick") == quick
    assert select_tasks("standard") == standard
    assert select_tasks("paper") == (*standard, "transfer", "robustness") == tuple(TASKS)


def test_every_task_module_is_registered_and_callable() -> None:
    files = {path.stem for path in Path(tasks.__file__).parent.glob("*.py")}
    assert files - {"__init__", "tsne"} == {task.module for task in TASKS.values()}
    assert all(callable(task.load()) for task in TASKS.values())


def test_tasks_run_in_registry_order_with_custom_tasks_last() -> None:
    assert select_tasks("quick", ["knn", "own", "linear"], ["own"]) == ("linear", "knn", "own")
    assert select_tasks("quick", (), ["own"])[-1] == "own"
    with pytest.raises(ValueError, match=r"suite .*quick, standard, paper, got 'all'"):
        select_tasks("all")
    with pytest.raises(ValueError, match=r"--tasks .*linear.*, got 'liner'"):
        select_tasks("quick", ["liner"])


def test_task_registry_does_not_import_torch() -> None:
    code = "import sys, compressive.evaluation.tasks, compressive.metric_info; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(SUITES) == {suite for task in TASKS.values() for suite in task.suites}
