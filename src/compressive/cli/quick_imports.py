"""Skip an import that commands do not need."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_ONLY_FOR_WANDB = "timm.utils.summary"  # imports wandb if it is installed, for a function of timm


class _NoWandbInTimm(MetaPathFinder):
    """Let only timm's import of wandb fail, which takes seconds; timm then works without it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise ImportError while timm imports wandb; otherwise leave the import to others."""
        importing = getattr(sys.modules.get(_ONLY_FOR_WANDB), "__spec__", None)
        if fullname == "wandb" and getattr(importing, "_initializing", False):
            raise ModuleNotFoundError("timm does not need wandb here", name=fullname)


def skip_wandb_in_timm() -> None:
    """Make commands start faster if wandb is installed; trackers are processes of their own."""
    if not any(isinstance(each, _NoWandbInTimm) for each in sys.meta_path):
        sys.meta_path.insert(0, _NoWandbInTimm())
