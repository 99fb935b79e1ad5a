"""Import timm without Weights & Biases: timm imports it if it is installed, which takes seconds."""

import sys
from importlib import import_module
from typing import Any

from compressive.platforms.compiler_import import compiler_deferred


class _LazyWandb:
    """The module wandb, imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("wandb"), name)


def import_timm() -> Any:
    """Return timm. Its function that logs to wandb imports wandb when it is called."""
    is_first = "wandb" not in sys.modules and "timm" not in sys.modules
    if is_first:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # makes `import wandb` fail
    try:
        with compiler_deferred():
            import timm
    finally:
        if is_first:
            del sys.modules["wandb"]
    summary: Any = sys.modules.get("timm.utils.summary")
    if is_first and summary is not None:
        summary.wandb = _LazyWandb()
    return timm
