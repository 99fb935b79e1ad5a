"""Engines of parallel work: the functions of independent units run here or on a Ray cluster."""
