"""Benchmark datasets for transfer and robustness."""
