"""`python -m compressive`, for torchrun."""

from compressive.cli.app import app

app(prog_name="compressive")
