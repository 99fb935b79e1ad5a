"""`python -m compressive`, for torchrun."""

from compressive.cli import app

app(prog_name="compressive")
