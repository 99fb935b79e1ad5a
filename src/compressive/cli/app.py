"""The `compressive` program: global options and the list of commands."""

import sys
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, NamedTuple, TextIO, cast

import typer

from compressive.cli import (
    convert_commands,
    doctor_command,
    evaluate_commands,
    export_commands,
    finetune_commands,
    info_commands,
    inspect_commands,
    pack_commands,
    sweep_commands,
    train_commands,
)
from compressive.cli.command import Command, Group, examples
from compressive.cli.terminal import print_warning
from compressive.platforms.garbage import exit_without_search
from compressive.progress import BrokenPipeSafe

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # wraps paragraphs to the width of the terminal
    pretty_exceptions_enable=False,
    help="Train image encoders without labels, and measure and control how much information "
    "they keep.",
)


class _Entry(NamedTuple):
    function: Callable[..., None]
    panel: str
    examples: tuple[str, ...]


_TRAIN, _MEASURE, _LOOK = "Train", "Evaluate and compare", "Look up"
_WEIGHTS, _DATA = "Convert and export", "Prepare images"
_COMMANDS: dict[str, _Entry] = {
    "quickstart": _Entry(
        train_commands.quickstart_command,
        _TRAIN,
        ("compressive quickstart", "compressive quickstart --out /tmp/quickstart --seed 1"),
    ),
    "pretrain": _Entry(
        train_commands.pretrain_command,
        _TRAIN,
        (
            "compressive pretrain ./photos",
            "compressive pretrain ./photos --method c-byol --batch-size 256 --epochs 200",
            "compressive pretrain ./cifar10 --recipe c-simclr/cifar10-r18-200 --out runs/a",
        ),
    ),
    "sweep": _Entry(
        sweep_commands.sweep_command,
        _TRAIN,
        (
            "compressive sweep ./photos --vary bottleneck.beta=0,1,3 --seeds 0,1,2",
            "compressive sweep ./cifar10 --recipe c-simclr/cifar10-r18-200 --preset beta",
        ),
    ),
    "finetune": _Entry(
        finetune_commands.finetune_command,
        _TRAIN,
        (
            "compressive finetune runs/a ./photos",
            "compressive finetune runs/a ./photos --labels 1%",
            "compressive finetune cifar10-byol-r18 ./photos --lr 0.05 --epochs 30",
        ),
    ),
    "evaluate": _Entry(
        evaluate_commands.evaluate_command,
        _MEASURE,
        (
            "compressive evaluate runs/a",
            "compressive evaluate runs/a --tasks linear,knn --max-images 5000",
            "compressive evaluate resnet50 --data ./photos --suite quick",
        ),
    ),
    "compare": _Entry(
        evaluate_commands.compare_command,
        _MEASURE,
        ("compressive compare runs/a runs/b", "compressive compare runs/a runs/b --markdown"),
    ),
    "report": _Entry(
        evaluate_commands.report_command,
        _MEASURE,
        ("compressive report runs/a runs/b", "compressive report sweeps/beta --out beta.html"),
    ),
    "embed": _Entry(
        evaluate_commands.embed_command,
        _MEASURE,
        (
            "compressive embed runs/a ./photos",
            "compressive embed cifar10-byol-r18 ./photos --out features.csv",
        ),
    ),
    "predict": _Entry(
        finetune_commands.predict_command,
        _MEASURE,
        (
            "compressive predict runs/finetuned ./photos",
            "compressive predict runs/finetuned ./photos --split test --out table.csv",
        ),
    ),
    "inspect": _Entry(
        inspect_commands.inspect_command,
        _DATA,
        (
            "compressive inspect ./photos",
            "compressive inspect ./photos --encoder runs/a --out photos.html --table photos.csv",
            "compressive inspect ./photos --encoder none",
        ),
    ),
    "pack": _Entry(
        pack_commands.pack_command,
        _DATA,
        (
            "compressive pack ./photos --out shards --size 256",
            "compressive pack ./photos --out shards --format parquet --drop-duplicates",
        ),
    ),
    "neighbors": _Entry(
        inspect_commands.neighbors_command,
        _MEASURE,
        (
            "compressive neighbors runs/a cat.jpg --in ./photos",
            "compressive neighbors runs/a cat.jpg --in features.parquet --out similar.html",
        ),
    ),
    "convert": _Entry(
        convert_commands.convert_command,
        _WEIGHTS,
        (
            "compressive convert ./checkpoint --out encoder.safetensors",
            "compressive convert ./ckpt-312785.index --out e.safetensors --heads heads.safetensors",
        ),
    ),
    "pack-encoder": _Entry(
        export_commands.pack_encoder_command,
        _WEIGHTS,
        (
            "compressive pack-encoder runs/a --out small.safetensors",
            "compressive pack-encoder runs/a --out half.safetensors --bits 16",
        ),
    ),
    "export": _Entry(
        export_commands.export_command,
        _WEIGHTS,
        (
            "compressive export runs/a --to timm --out exported",
            "compressive export runs/a --to onnx --out encoder.onnx --with-preprocessing",
            "compressive export runs/a --to huggingface --out exported --license apache-2.0",
        ),
    ),
    "recipes": _Entry(
        info_commands.recipes_command,
        _LOOK,
        (
            "compressive recipes",
            "compressive recipes c-byol",
            "compressive recipes c-byol/imagenet-r50-300",
        ),
    ),
    "settings": _Entry(
        info_commands.settings_command,
        _LOOK,
        ("compressive settings", "compressive settings optim", "compressive settings optim.lr"),
    ),
    "watch": _Entry(
        info_commands.watch_command,
        _LOOK,
        ("compressive watch runs/a", "compressive watch runs/a --once"),
    ),
    "meter": _Entry(
        info_commands.meter_command,
        _LOOK,
        ("compressive meter", "compressive meter --kappa-e 4096 --dim 128"),
    ),
    "doctor": _Entry(
        doctor_command.doctor_command, _LOOK, ("compressive doctor", "compressive doctor --json")
    ),
}
for _name, (_function, _panel, _lines) in _COMMANDS.items():
    app.command(_name, cls=Command, rich_help_panel=_panel, epilog=examples(*_lines))(_function)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        print(version("compressive"))
        raise typer.Exit
    return wanted


@app.callback()
def global_options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
) -> None:
    """Train image encoders; measure and control how much information they keep."""
    # A file on Windows may lack characters of the output, such as arrows.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # A closed pipe must not abort the command or change its exit code.
    sys.stdout, sys.stderr = (
        cast(TextIO, BrokenPipeSafe(stream)) for stream in (sys.stdout, sys.stderr)
    )
    warnings.showwarning = print_warning
    exit_without_search()


def main() -> None:
    """Run the program, and end the process even if a check of `doctor` hangs."""
    try:
        app(prog_name="compressive")
    except SystemExit as stop:
        doctor_command.exit_at_once(stop.code if isinstance(stop.code, int) else 1)
        raise
