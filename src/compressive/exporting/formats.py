"""Names of the export formats, what each needs, and checks of options; imports no torch."""

import difflib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple


class FormatInfo(NamedTuple):
    """What is known of a format before torch is imported."""

    module: str  # in this package
    suffix: str  # of the file; "" if the export is a folder
    requires: tuple[str, ...] = ()  # modules of the extra
    extra: str = ""  # name of the extra in pyproject.toml
    has_graph: bool = False  # whether it stores the computation, not only weights


EXPORT_FORMATS = {
    "timm": FormatInfo("timm_format", ""),
    "torchvision": FormatInfo("torchvision_format", ".pth"),
    "huggingface": FormatInfo("huggingface", "", ("transformers",), "huggingface"),
    "onnx": FormatInfo("onnx_format", ".onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx", True),
    "torch-export": FormatInfo("torch_export", ".pt2", has_graph=True),
}
GRAPH_FORMATS = tuple(name for name, info in EXPORT_FORMATS.items() if info.has_graph)
_GRAPH_TORCH = (2, 11)  # torch 2.6 fails to export our graphs; versions between are not tested
# What other programs call a format.
_ALIASES = {
    **dict.fromkeys(("hf", "hub", "transformers", "hugging-face"), "huggingface"),
    **dict.fromkeys(("pt2", "torch", "pytorch", "export", "torch_export"), "torch-export"),
    **dict.fromkeys(("onnxruntime", "ort"), "onnx"),
    "tv": "torchvision",
}


class CannotRepresent(ValueError):
    """Raised if a format cannot represent a network exactly."""

    def __init__(self, to: str, reason: str, works: tuple[str, ...] = GRAPH_FORMATS) -> None:
        hint = " or ".join(f"--to {name}" for name in works if name != to)
        super().__init__(f"--to {to} cannot represent this encoder: {reason}; use {hint}")


def check_format_name(to: str) -> FormatInfo:
    """Return a format; raise ValueError if it is unknown or its extra is not installed."""
    allowed = ", ".join(EXPORT_FORMATS)
    if to not in EXPORT_FORMATS:
        near = _ALIASES.get(to.lower()) or next(
            iter(difflib.get_close_matches(to.lower(), EXPORT_FORMATS, n=1, cutoff=0.5)), ""
        )
        hint = f"did you mean {near}? " if near and to else ""
        got = f"got {to!r}" if to else "but it is missing"
        raise ValueError(f"--to must be one of {allowed}, {got}; {hint}".rstrip("; "))
    info = EXPORT_FORMATS[to]
    if absent := [name for name in info.requires if importlib.util.find_spec(name) is None]:
        command = f"pip install 'compressive[{info.extra}]'"
        raise ValueError(f"--to {to} needs {', '.join(absent)}, not installed here; run {command}")
    return info


def check_torch_version(to: str) -> None:
    """Raise ValueError if the installed torch cannot store graphs and the format needs one."""
    installed = importlib.metadata.version("torch")
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:2]))
    if EXPORT_FORMATS[to].has_graph and numbers < _GRAPH_TORCH:
        least = ".".join(map(str, _GRAPH_TORCH))
        raise ValueError(
            f"--to {to} needs torch {least} or newer, here it is {installed}; upgrade torch, or "
            "use --to timm"
        )


def check_options(
    to: str, out: str | Path, *, with_preprocessing: bool, license_name: str, push: str
) -> FormatInfo:
    """Return the format; raise ValueError if an option does not apply to it."""
    info = check_format_name(to)
    if with_preprocessing and not info.has_graph:
        graphs = ", ".join(GRAPH_FORMATS)
        raise ValueError(f"--with-preprocessing is for --to {graphs}, not {to}, which has no graph")
    for option, value in (("--license", license_name), ("--push", push)):
        if value and to != "huggingface":
            raise ValueError(f"{option} is for --to huggingface, not {to}")
    if push and (push.count("/") != 1 or not all(push.split("/"))):
        raise ValueError(f"--push must be ORG/NAME, got {push!r}")
    if not str(out):
        example = f"encoder{info.suffix}" if info.suffix else "exported"
        raise ValueError(f"--out is missing; name the place to write, such as {example}")
    if info.suffix and Path(out).suffix.lower() != info.suffix:
        raise ValueError(f"--out must end with {info.suffix} for --to {to}, got {str(out)!r}")
    return info
