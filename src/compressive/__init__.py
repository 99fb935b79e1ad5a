"""Measure and control how much information a visual representation keeps."""

from typing import TYPE_CHECKING

from compressive import metrics as metrics
from compressive import objectives as objectives
from compressive import optim as optim
from compressive.uniform import HypersphericalUniform as HypersphericalUniform
from compressive.vmf import VonMisesFisher as VonMisesFisher

if TYPE_CHECKING:
    from compressive.encoder import load as load
else:

    def __getattr__(name: str) -> object:
        """`load`, when it is asked for: its networks are timm's, which takes seconds to import."""
        if name == "load":
            from compressive.encoder import load

            return load
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
