"""Von Mises-Fisher and uniform distributions on the sphere, and their special functions."""

from compressive.distributions.uniform import HypersphericalUniform
from compressive.distributions.vmf import VonMisesFisher

__all__ = ["HypersphericalUniform", "VonMisesFisher"]
