"""The corruptions of ImageNet-C, made on the device."""
