"""Let Python search for reference cycles less often while modules are imported and steps compiled.

Imports and compilers create millions of objects that stay. Searching them takes a sixth of the
time until the first step.
"""

import atexit
import gc
import sys

_RARE = (100_000, 50, 100)  # as fast as no search at all, and memory stays bounded
_saved: list[tuple[int, int, int]] = []
_frozen: list[bool] = []


def collect_rarely() -> None:
    """Search rarely until `collect_as_usual` is called; do nothing if the user turned it off."""
    if not _saved and gc.isenabled():
        _saved.append(gc.get_threshold())
        gc.set_threshold(*_RARE)


def skip_existing_objects() -> None:
    """Exclude existing objects from searches until `collect_as_usual` is called.

    torch searches after each compilation, which would otherwise visit all imported modules.
    """
    if _saved and gc.get_freeze_count() == 0:  # not if the user froze some
        gc.freeze()
        _frozen.append(True)


def collect_as_usual() -> None:
    """Restore the thresholds, unless someone else has changed them meanwhile."""
    if _frozen:
        _frozen.clear()
        gc.unfreeze()
    if _saved:
        before = _saved.pop()
        if gc.get_threshold() == _RARE:
            gc.set_threshold(*before)


def exit_without_search() -> None:
    """Let Python end without searching all imported modules for cycles, which takes 0.6 s.

    Close files that must be written: those that only a cycle refers to are not flushed.
    """
    atexit.unregister(_skip_search)  # once, also if several commands run in this process
    atexit.register(_skip_search)


def _skip_search() -> None:
    if "triton" not in sys.modules:  # it prints a line for each of its objects that is left
        gc.freeze()
