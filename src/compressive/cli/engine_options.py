"""Options of commands whose work can run on a Ray cluster."""

from typing import Annotated

import typer

_PANEL = "Parallel work"
_ENGINE_HELP = (
    "local, ray (the cluster in RAY_ADDRESS, else one that starts on this machine), or "
    "ray://HOST:PORT."
)
_GPUS_HELP = "GPUs of each Ray task, also a fraction such as 0.25; default: 1 on a GPU."
_CPUS_HELP = "Cores of each Ray task; 0: 1, or a GPU's share of the cores."
EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="ENGINE", help=_ENGINE_HELP, rich_help_panel=_PANEL),
]
GpusPerTask = Annotated[float | None, typer.Option(help=_GPUS_HELP, rich_help_panel=_PANEL)]
CpusPerTask = Annotated[int, typer.Option(help=_CPUS_HELP, rich_help_panel=_PANEL)]
