"""Measure and control how much information a visual representation keeps."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressive import metrics, objectives, optim
    from compressive.distributions.uniform import HypersphericalUniform
    from compressive.distributions.vmf import VonMisesFisher
    from compressive.encoder import load
    from compressive.evaluation.embed import embed
    from compressive.evaluation.suite import evaluate
    from compressive.train.loop import pretrain

__all__ = ["HypersphericalUniform", "VonMisesFisher", "embed", "evaluate", "load", "metrics"]
__all__ += ["objectives", "optim", "pretrain"]
_MODULES = {
    "HypersphericalUniform": "distributions.uniform",
    "VonMisesFisher": "distributions.vmf",
    "embed": "evaluation.embed",
    "evaluate": "evaluation.suite",
    "load": "encoder",
    "pretrain": "train.loop",
}


def __getattr__(name: str) -> object:
    """Import public names lazily: torch and timm take seconds."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
