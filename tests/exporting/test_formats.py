"""Options of `compressive export` that are checked before torch is imported."""

import importlib.metadata
import importlib.util
from typing import Any

import pytest

from compressive.exporting.formats import (
    check_format_name,
    check_options,
    check_torch_version,
)


def checked(to: str, out: str, **changes: Any) -> None:
    options: dict[str, Any] = {"with_preprocessing": False, "license_name": "", "push": ""}
    check_options(to, out, **{**options, **changes})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("onx", "onnx"), ("hf", "huggingface"), ("pt2", "torch-export"), ("TIMM", "timm")],
)
def test_wrong_format_names_the_format_that_is_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"--to .*'{wrong}'.* {meant}\?"):
        check_format_name(wrong)


@pytest.mark.parametrize("version", ["2.6.0", "2.10.1+cu128"])
def test_graphs_need_a_newer_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    for to in ("onnx", "torch-export"):
        with pytest.raises(ValueError, match=rf"--to {to} needs torch 2\.11 .*{version[:4]}.*timm"):
            check_torch_version(to)
    check_torch_version("timm")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.11.0a0")
    check_torch_version("onnx")


def test_missing_format_lists_all() -> None:
    with pytest.raises(ValueError, match=r"--to .*timm, torchvision, huggingface, onnx"):
        check_format_name("")


def test_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name)
    )
    with pytest.raises(ValueError, match=r"needs onnxruntime.*pip install 'compressive\[onnx\]'"):
        check_format_name("onnx")
    check_format_name("timm")


@pytest.mark.parametrize(
    ("to", "out", "changes", "named"),
    [
        ("timm", "x", {"with_preprocessing": True}, "--with-preprocessing"),
        ("onnx", "x.onnx", {"license_name": "mit"}, "--license"),
        ("timm", "x", {"push": "a/b"}, "--push"),
        ("huggingface", "x", {"push": "b"}, "--push .*'b'"),
        ("huggingface", "x", {"push": "a/"}, "--push .*'a/'"),
        ("onnx", "x.pt", {}, r"--out .*\.onnx.*'x\.pt'"),
        ("torchvision", "x", {}, r"--out .*\.pth.*'x'"),
        ("timm", "", {}, "--out"),
    ],
)
def test_option_that_does_not_apply_is_rejected(
    to: str, out: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        checked(to, out, **changes)


def test_valid_options_are_accepted() -> None:
    checked("huggingface", "x", license_name="mit", push="a/b")
    checked("onnx", "x.ONNX", with_preprocessing=True)
