"""Sweeps over settings: plan, run and tabulate many runs."""
