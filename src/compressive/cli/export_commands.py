"""The commands that write an encoder in formats of other libraries, or in a smaller file."""

from pathlib import Path
from typing import Annotated

import typer

from compressive.cli.evaluate_commands import EncoderName, InputSize, TimmName
from compressive.cli.terminal import (
    one_line_errors,
    path_option,
    print_line,
    require_at_least,
)
from compressive.exporting.formats import EXPORT_FORMATS, check_options
from compressive.rundir.lock import ensure_writable
from compressive.weights import require_path

_TO_HELP = f"Format: {', '.join(EXPORT_FORMATS)}."
_EXPORT_OUT_HELP = "Folder to write (timm, huggingface), or file: .pth, .onnx or .pt2."
_PREPROCESSING_HELP = "Include resizing, crop and normalization in the graph (onnx, torch-export)."
_HALF_HELP = "Store weights as float16; outputs may then differ by up to 1e-2."
_IMAGES_HELP = "Images for the comparison of features; default: the run's, else built-in ones."
_LICENSE_HELP = "License in the model card, such as apache-2.0 (huggingface)."
_PACKED_OUT_HELP = "File to write; its name ends with .safetensors."
_BITS_HELP = "Bits per weight of matrices and kernels: 8 or 16. With 8, small kernels have 16."
_PUSH_HELP = "Also upload to this repository of the Hugging Face Hub (huggingface)."


def _complete_format(incomplete: str) -> list[str]:
    """Return the formats that begin with the text."""
    return [name for name in EXPORT_FORMATS if name.startswith(incomplete)]


def export_command(
    encoder: EncoderName,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help=_TO_HELP, autocompletion=_complete_format)
    ] = "",
    out: Annotated[str, path_option(help=_EXPORT_OUT_HELP, metavar="PATH")] = "",
    with_preprocessing: Annotated[
        bool, typer.Option("--with-preprocessing", help=_PREPROCESSING_HELP)
    ] = False,
    half: Annotated[bool, typer.Option("--half", help=_HALF_HELP)] = False,
    images: Annotated[str, path_option(help=_IMAGES_HELP)] = "",
    license: Annotated[str, typer.Option("--license", help=_LICENSE_HELP)] = "",
    push: Annotated[str, typer.Option("--push", metavar="ORG/NAME", help=_PUSH_HELP)] = "",
    network: TimmName = "",
    size: InputSize = 0,
) -> None:
    """Write an encoder for timm, torchvision, Hugging Face, ONNX or torch.export, and verify it.

    The exported encoder is loaded again, and its features are compared with the original on images.
    Nothing is written if they differ, or if the format cannot represent the encoder exactly.
    """
    with one_line_errors():
        require_at_least(0, size=size)
        check_options(
            to, out, with_preprocessing=with_preprocessing, license_name=license, push=push
        )
        require_path(encoder)
        from compressive.exporting.export import export

        done = export(
            encoder,
            to,
            Path(out),
            with_preprocessing=with_preprocessing,
            half=half,
            images=images,
            network=network,
            size=size,
            license=license,
            push=push,
        )
    for text in done.notes:
        print_line(f"note: {text}")
    parity = done.parity
    where = f"{parity.count} images of {parity.images}"
    print_line(
        f"largest difference: {parity.difference:.1e} of the largest output on {where}; limit "
        f"{parity.tolerance:g}"
    )
    print_line(f"exported: {done.path} ({done.to}); record: {done.record}")
    if done.address:
        print_line(f"pushed: {done.address}")
    print_line(f"in Python: {done.usage}")


def pack_encoder_command(
    encoder: EncoderName,
    out: Annotated[Path, path_option(help=_PACKED_OUT_HELP)],
    bits: Annotated[int, typer.Option(help=_BITS_HELP)] = 8,
) -> None:
    """Write an encoder with 8 or 16 bits per weight: a quarter or half of the bytes.

    Every command reads the file and computes in float32. The features of both are compared on
    images.
    """
    with one_line_errors():
        if bits not in (8, 16):
            raise ValueError(f"--bits must be 8 or 16, got {bits}")
        if out.suffix != ".safetensors":
            raise ValueError(f"--out must end with .safetensors, got {str(out)!r}")
        if out.exists():
            raise ValueError(f"--out {out} exists; choose another or remove it")
        require_path(encoder)
        ensure_writable(out.parent)
        from compressive.exporting.smaller import write_smaller

        done = write_smaller(encoder, out, bits=bits)
    print_line(
        f"largest difference: {done.difference:.1e} of the largest output on {done.count} images "
        f"of {done.images}"
    )
    print_line(f"encoder: {out}, {out.stat().st_size / 1e6:.1f} MB with {bits} bits per weight")
