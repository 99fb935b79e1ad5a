"""Differences between devices and operating systems: float64, accelerators, memory, files."""
