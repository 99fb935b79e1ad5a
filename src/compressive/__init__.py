"""Measure and control how much information a visual representation keeps."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressive import metrics as metrics
    from compressive import objectives as objectives
    from compressive import optim as optim
    from compressive.distributions.uniform import HypersphericalUniform as HypersphericalUniform
    from compressive.distributions.vmf import VonMisesFisher as VonMisesFisher
    from compressive.encoder import load as load

_FROM = {
    "load": "encoder",
    "HypersphericalUniform": "distributions.uniform",
    "VonMisesFisher": "distributions.vmf",
}
_MODULES = ("metrics", "objectives", "optim")


def __getattr__(name: str) -> object:
    """What is asked for, when it is: torch and timm take seconds to import, a help text none."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _FROM:
        return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_MODULES, *_FROM]
