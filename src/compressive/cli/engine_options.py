"""Options of commands whose work can run on a Ray cluster."""

from typing import Annotated

import typer

_PANEL = "Parallel work"
_ENGINE_HELP = (
    "local, ray (the cluster in RAY_ADDRESS, else one that starts on this machine), or "
    "ray://HOST:PORT."
)
_GPUS_HELP = "GPUs that each Ray task reserves, such as 2 or 0.25; default: 1 if it uses a GPU."
_CPUS_HELP = "CPU cores that each Ray task reserves; 0: 1, or a GPU's share of all cores."
EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="ENGINE", help=_ENGINE_HELP, rich_help_panel=_PANEL),
]
GpusPerTask = Annotated[float | None, typer.Option(help=_GPUS_HELP, rich_help_panel=_PANEL)]
CpusPerTask = Annotated[int, typer.Option(help=_CPUS_HELP, rich_help_panel=_PANEL)]
