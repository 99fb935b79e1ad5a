"""The run folder: its files, lock, checkpoints, metrics log and records."""
