"""Values that the shell completes: recipes, settings, tasks, methods and encoders; no torch."""

from collections.abc import Iterable

from compressive import recipes, weights
from compressive.cli import settings_reference
from compressive.config import METHODS, TRACKERS
from compressive.evaluation.tasks import SUITES, TASKS
from compressive.sweep.plan import NO_SUITE, PRESETS


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes that begin with the text."""
    return _beginning(incomplete, recipes.names())


def complete_method(incomplete: str) -> list[str]:
    """Return the methods that begin with the text."""
    return _beginning(incomplete, METHODS)


def complete_suite(incomplete: str) -> list[str]:
    """Return the suites that begin with the text."""
    return _beginning(incomplete, [*SUITES, NO_SUITE])


def complete_preset(incomplete: str) -> list[str]:
    """Return the presets of sweeps that begin with the text."""
    return _beginning(incomplete, PRESETS)


def complete_encoder(incomplete: str) -> list[str]:
    """Return the encoders of the package that begin with the text; the shell adds files."""
    return _beginning(incomplete, weights.names())


def complete_data(incomplete: str) -> list[str]:
    """Return the sources of images that are no files; the shell adds files."""
    return _beginning(incomplete, ("builtin", "torchvision:"))


def complete_tasks(incomplete: str) -> list[str]:
    """Return tasks for the last name of a list with commas."""
    return _complete_list(incomplete, TASKS)


def complete_trackers(incomplete: str) -> list[str]:
    """Return trackers for the last name of a list with commas."""
    return _complete_list(incomplete, TRACKERS)


def complete_setting(incomplete: str) -> list[str]:
    """Return NAME= of settings that begin with the text or, after "=", the allowed values."""
    settings = {s.name: s for section in settings_reference.sections() for s in section.settings}
    name, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{each}=" for each in _beginning(name, settings)]
    allowed = settings[name].allowed if name in settings else ""
    options = ["true", "false"] if allowed == "true or false" else allowed.split(", ")
    if len(options) < 2 or "number" in allowed:
        return []
    return [f"{name}={option}" for option in _beginning(value, options)]


def complete_section(incomplete: str) -> list[str]:
    """Return the sections and settings that begin with the text."""
    every = settings_reference.sections()
    names = [section.name for section in every if section.name]
    names += [setting.name for section in every for setting in section.settings]
    return _beginning(incomplete, names)


def _complete_list(incomplete: str, names: Iterable[str]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    chosen = before.split(",")
    free = [name for name in names if name not in chosen]
    return [f"{before}{comma}{name}" for name in _beginning(last, free)]


def _beginning(text: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(text)]
