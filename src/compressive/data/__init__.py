"""Image sources, splits, sampling order, and loaders to the device."""
