"""The list of evaluation tasks, readable without importing torch.

A task is a file in this package with a function `run(context)`. A new task needs its file, one
line in `TASKS`, and one line in `metric_info.METRIC_INFO` for each new metric.
"""

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

SUITES = ("quick", "standard", "paper")


class Task(NamedTuple):
    """A task; `name` is its name on the command line. Importing its module needs torch."""

    name: str
    module: str
    suites: tuple[str, ...] = SUITES
    needs_labels: bool = True
    reads_test_sets: bool = False  # benchmark test images, which `--held-out` must not read

    def load(self) -> Callable[[Any], None]:
        """Import and return the function of the task, which takes an `EvalContext`."""
        return import_module(f"{__name__}.{self.module}").run


_STANDARD = ("standard", "paper")
_ALL_TASKS = (  # in the order in which they run
    Task("linear", "linear", _STANDARD),
    Task("logistic", "logistic"),
    Task("knn", "knn"),
    Task("few-label", "few_label"),
    Task("geometry", "geometry", needs_labels=False),
    Task("corruptions", "corruption", _STANDARD),
    Task("smoothness", "smoothness", _STANDARD, needs_labels=False),
    Task("invariance", "invariance", _STANDARD, needs_labels=False),
    Task("information", "information", _STANDARD, needs_labels=False),
    Task("gallery", "gallery", _STANDARD, needs_labels=False),
    Task("transfer", "transfer", ("paper",), needs_labels=False, reads_test_sets=True),
    Task("robustness", "robustness", ("paper",), reads_test_sets=True),
)
TASKS = {task.name: task for task in _ALL_TASKS}
# Other names of tasks. Logistic regression measures calibration (ECE, Brier score) at little cost.
TASK_ALIASES = {"calibration": "logistic", "few-labels": "few-label", "corruption": "corruptions"}


def split_names(tasks: str | Sequence[str]) -> list[str]:
    """Return the names of tasks that are given as a list or as one text with commas."""
    if not tasks:
        return []
    return [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks)]


def select_tasks(
    suite: str, names: Sequence[str] = (), more: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the tasks `names`, or those of a suite, in the order in which they run.

    `more` are names of tasks from outside the package; they run last. Raise ValueError for an
    unknown suite or task.
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    known = tuple(dict.fromkeys((*TASKS, *more)))
    names = [TASK_ALIASES.get(name, name) for name in names]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            allowed = ", ".join((*known, *TASK_ALIASES))
            raise ValueError(f"--tasks must be among {allowed}, got {name!r}{hint}")
    in_suite = {task.name for task in _ALL_TASKS if suite in task.suites}
    return tuple(name for name in known if name in (names or in_suite.union(more)))
