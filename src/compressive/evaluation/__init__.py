"""Judging an encoder: everything that the paper measures."""
