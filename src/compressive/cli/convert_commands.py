"""The command that converts TensorFlow checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from compressive.cli.terminal import (
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    print_next,
)

if TYPE_CHECKING:
    from compressive.tensorflow_checkpoint.convert import Converted

_PATH_HELP = "A folder, an .index file, or the prefix of a checkpoint's file names."
_ENCODER_OUT_HELP = "Encoder to write: a file that ends in .safetensors."
_HEADS_HELP = "Also write the projection, predictor, target network and linear classifier here."


def convert_command(
    path: Annotated[Path, path_argument(help=_PATH_HELP)],
    out: Annotated[Path, path_option(help=_ENCODER_OUT_HELP)],
    heads: Annotated[Path | None, path_option(help=_HEADS_HELP)] = None,
) -> None:
    """Convert a TensorFlow checkpoint of the paper's official code; needs no TensorFlow.

    Identifies method and network by the variables in the checkpoint, and verifies its checksums.
    """
    with one_line_errors():
        from compressive.tensorflow_checkpoint.convert import convert

        found = convert(path, out, heads=heads)
        for line in _summary_lines(found):
            print_line(line)
        if found.heads is not None:
            print_line(f"heads: {found.heads}")
        print_line(f"encoder: {found.path}, fingerprint {found.fingerprint}")
        print_next("evaluate", found.path, "--data", "IMAGENET")


def _summary_lines(found: "Converted") -> list[str]:
    """Return what a checkpoint contained, one line each."""
    network = found.network
    width = f" {network.width}x" if network.width > 1 else ""
    step = "step unknown" if found.step is None else f"step {found.step:,}"
    cifar = ", CIFAR stem" if network.stem == "cifar" else ""
    name = f"{network.name}{width}{cifar}, input {found.size} px, {step}"
    lines = [f"found: {' or '.join(found.methods)}, {name} ({found.checkpoint})"]
    lines.append(f"networks: encoder, {', '.join(found.parts)}".removesuffix(", "))
    if len(found.methods) > 1:
        both = " and ".join(found.methods)
        lines.append(f"note: {both} have the same variables; the checkpoint does not say which")
    if found.methods == ("byol",) and "predictor" not in found.parts:
        lines.append("note: BYOL without a predictor, which the official script leaves out")
    if found.classifier is not None:
        inputs, classes = found.classifier
        of = f"of {classes:,} classes on the {inputs:,}-dimensional {found.classifier_input}"
        hint = "" if found.heads else "; --heads writes it"
        lines.append(f"note: the checkpoint also contains a linear classifier {of}{hint}")
    if found.ignored:
        lines.append(f"note: unknown parts are left out: {', '.join(found.ignored)}")
    return lines
