"""Augmentations of whole batches on the device."""
