"""Evaluation of an encoder with all measurements of the paper."""
