"""Augmentations of whole batches on the device."""

from compressive.augment.ops import augment, augment_pair, normalize
from compressive.augment.params import View, paper_views, simclr_views

__all__ = ["View", "augment", "augment_pair", "normalize", "paper_views", "simclr_views"]
