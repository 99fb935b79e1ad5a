"""Export an encoder to a format of another library, and verify the result."""

import importlib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compressive.exporting.destination import (
    check_destination,
    move_into_place,
    record_path,
    staged,
    write_record,
)
from compressive.exporting.formats import FormatInfo, check_options, check_torch_version
from compressive.exporting.huggingface import preprocessing_difference
from compressive.exporting.model import ExportModel, load_model
from compressive.exporting.model_card import model_card
from compressive.exporting.parity import (
    HALF_TOLERANCE,
    TOLERANCE,
    Parity,
    compare_outputs,
    loaded_outputs,
    parity_images,
    with_larger_image,
)
from compressive.exporting.push import push_folder, require_token
from compressive.rundir.files import local_path
from compressive.rundir.folder import command, package_version

_NOTE_ABOVE = 1e-3  # difference by preprocessing that is worth a note


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written, and how exact it is."""

    path: Path
    record: Path  # export.json
    to: str
    parity: Parity
    usage: str  # Python code that loads the export
    notes: tuple[str, ...] = ()
    address: str = ""  # of the repository, if the export was pushed


def export(
    encoder: str | Path,
    to: str,
    out: str | Path,
    *,
    with_preprocessing: bool = False,
    half: bool = False,
    images: str | Path = "",
    network: str = "",
    size: int = 0,
    license: str = "",
    push: str = "",
) -> Export:
    """Write an encoder in a format of another library and compare the features of both.

    The arguments are those of `compressive export`. Nothing is written if the format cannot
    represent the encoder exactly, or if outputs differ by more than 1e-4 (with `half` 1e-2) of the
    largest output on `images`.
    """
    out = local_path(out) if str(out) else Path()
    info = check_options(
        to,
        out if str(out) != "." else "",
        with_preprocessing=with_preprocessing,
        license_name=license,
        push=push,
    )
    check_torch_version(to)
    is_folder = not info.suffix
    check_destination(out, is_folder=is_folder)
    if push:
        require_token()
    kind: Any = importlib.import_module(f"compressive.exporting.{info.module}")
    model = load_model(encoder, network=network, size=size)
    kind.check(model)
    pictures, origin = parity_images(images, model.run)
    if with_preprocessing:
        pictures = with_larger_image(pictures, model.encoder.side)
    inputs = model.encoder.preprocess(pictures)
    notes: tuple[str, ...] = ()
    with staged(out) as path:
        kind.write(model, path, half=half, with_preprocessing=with_preprocessing)
        found = loaded_outputs(
            kind.outputs, model, path, pictures if with_preprocessing else inputs
        )
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        parity = compare_outputs(model.outputs(inputs), found, tolerance=tolerance, images=origin)
        record = _record(model, info, to, parity, half=half, with_preprocessing=with_preprocessing)
        if is_folder:
            change = preprocessing_difference(model, path, pictures)
            record["preprocessing_difference"] = change
            notes = _preprocessing_note(change)
        if to == "huggingface":
            text = model_card(
                model,
                parity,
                versions=record["versions"],
                license_name=license,
                preprocessing_difference=record["preprocessing_difference"],
            )
            (path / "README.md").write_text(text, "utf-8")
        write_record(path, record, is_folder=is_folder)
        move_into_place(path, out, is_folder=is_folder)
    address = push_folder(out, push) if push else ""
    return Export(
        path=out,
        record=record_path(out, is_folder=is_folder),
        to=to,
        parity=parity,
        usage=kind.usage(model, out),
        notes=notes,
        address=address,
    )


def _preprocessing_note(change: float) -> tuple[str, ...]:
    if change <= _NOTE_ABOVE:
        return ()
    return (
        f"timm's transform resizes differently from the encoder's preprocessing: with it, outputs "
        f"differ by up to {change:.2g} of the largest output on these images",
    )


def _record(
    model: ExportModel,
    info: FormatInfo,
    to: str,
    parity: Parity,
    *,
    half: bool,
    with_preprocessing: bool,
) -> dict[str, Any]:
    encoder = model.encoder
    packages = ("compressive", "torch", "timm", "torchvision", *info.requires)
    return {
        "format": to,
        "source": model.source,
        "checksum": model.checksum(),
        "network": asdict(encoder.settings),
        "input_size": encoder.size,
        "mean": list(encoder.mean),
        "std": list(encoder.std),
        "classes": list(model.classes),
        "half": half,
        "with_preprocessing": with_preprocessing,
        "images": parity.images,
        "image_count": parity.count,
        "largest_difference": parity.difference,
        "largest_output": parity.largest_output,
        "tolerance": parity.tolerance,
        "versions": {name: package_version(name) for name in packages},
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
    }
