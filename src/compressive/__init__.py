"""Measure and control how much information a visual representation keeps."""

from compressive import metrics as metrics
from compressive import objectives as objectives
from compressive import optim as optim
from compressive.uniform import HypersphericalUniform as HypersphericalUniform
from compressive.vmf import VonMisesFisher as VonMisesFisher
