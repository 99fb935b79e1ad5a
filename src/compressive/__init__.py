"""Measure and control how much information a visual representation keeps."""

from compressive.vmf import HypersphericalUniform as HypersphericalUniform
from compressive.vmf import VonMisesFisher as VonMisesFisher
