"""`python -m compressive`, for torchrun."""

from compressive.cli.app import main

main()
