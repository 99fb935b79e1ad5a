"""Exports to timm: exact features, or a refusal that names the setting."""

import json
from pathlib import Path
from typing import Any

import exportable
import pytest
import torch

from compressive.augment.published_crop import PublishedCrop
from compressive.exporting import timm_format
from compressive.exporting.formats import CannotRepresent
from compressive.exporting.model import ExportModel


def exported(model: ExportModel, folder: Path) -> torch.Tensor:
    """Return the difference of outputs in timm, on noise."""
    timm_format.check(model)
    timm_format.write(model, folder, half=False, with_preprocessing=False)
    inputs = torch.randn(2, 3, model.encoder.size, model.encoder.size)
    (found,) = timm_format.outputs(model, folder, [inputs])["timm"]
    expected = model.outputs(inputs)
    assert expected.abs().max() > 0.01
    return (found - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_network_of_timm_keeps_its_features(name: str, tmp_path: Path) -> None:
    assert exported(exportable.model(name, 32), tmp_path) < 1e-6


@pytest.mark.slow
def test_classifier_with_tensorflow_pooling_keeps_its_logits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"variant": "official", "zero_init_last": False}
    model = exportable.model("resnet50", 32, classes=("a", "b"), **options)
    assert exported(model, tmp_path) < 1e-6
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_args"]["stem_type"] == "same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "size"),  # even and odd sides before the pool
    [
        ("resnet50", {"width": 2, "variant": "official"}, 38),
        ("resnet101", {"variant": "official"}, 32),
        ("resnet34", {}, 32),
        pytest.param("resnet50", {"width": 2}, 32, marks=pytest.mark.stress),
        pytest.param("resnet152", {"variant": "official"}, 38, marks=pytest.mark.stress),
    ],
)
def test_wide_and_official_resnets_keep_their_features(
    name: str, options: dict[str, Any], size: int, tmp_path: Path
) -> None:
    assert exported(exportable.model(name, size, **options), tmp_path) < 1e-6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stem": "cifar"}, "network.stem=cifar"),
        ({"width": 2}, "width=2"),
        ({"variant": "official"}, "network.variant=official"),
    ],
)
def test_network_that_timm_cannot_build_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(CannotRepresent, match=f"--to timm .*{named}.*--to onnx"):
        timm_format.check(exportable.model("resnet18", 32, on="meta", **options))


def test_network_with_other_weights_is_refused() -> None:
    model = exportable.model()
    model.encoder.network.add_module("more", torch.nn.Linear(1, 1))
    with pytest.raises(CannotRepresent, match="test_resnet"):
        timm_format.check(model)


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext"])
def test_classifier_keeps_its_logits_and_names(name: str, tmp_path: Path) -> None:
    assert exported(exportable.model(name, 32, classes=("a", "b", "ç")), tmp_path) < 1e-6
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_classes"], config["label_names"]) == (3, ["a", "b", "ç"])


def test_config_has_the_preprocessing(tmp_path: Path) -> None:
    model = exportable.model(size=64, crop=PublishedCrop(0.95, "bilinear", squash=True))
    timm_format.write(model, tmp_path, half=False, with_preprocessing=False)
    found = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert found["input_size"] == [3, 64, 64]
    assert (found["crop_pct"], found["interpolation"]) == (0.95, "bilinear")
    assert (found["crop_mode"], found["mean"]) == ("squash", [0.485, 0.456, 0.406])
    own = exportable.model(size=64)
    timm_format.write(own, tmp_path, half=False, with_preprocessing=False)
    found = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert (found["crop_pct"], found["interpolation"]) == (0.875, "bicubic")


def test_half_stores_kernels_as_float16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = exportable.model()
    timm_format.write(model, tmp_path, half=True, with_preprocessing=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert {v.dtype for v in stored.values() if v.ndim > 1} == {torch.float16}
    assert stored["bn1.weight"].dtype == torch.float32
    (found,) = timm_format.outputs(model, tmp_path, [torch.randn(2, 3, 16, 16)])["timm"]
    assert found.dtype == torch.float32
