"""Corruptions of ImageNet-C and CIFAR-10-C, computed on the device."""

from compressive.corruptions.parameters import EXTRAS as EXTRAS
from compressive.corruptions.parameters import NAMES as NAMES
