"""Exports to torchvision: exact features, or a refusal that names the setting."""

from pathlib import Path
from typing import Any

import exportable
import pytest
import torch

from compressive.exporting import torchvision_format
from compressive.exporting.formats import CannotRepresent


@pytest.mark.parametrize("classes", [(), ("a", "b", "c")])
def test_resnet_keeps_its_outputs(classes: tuple[str, ...], tmp_path: Path) -> None:
    model = exportable.model("resnet18", 32, classes=classes)
    torchvision_format.check(model)
    path = tmp_path / "encoder.pth"
    torchvision_format.write(model, path, half=False, with_preprocessing=False)
    inputs = torch.randn(2, 3, 32, 32)
    (found,) = torchvision_format.outputs(model, path, [inputs])["torchvision"]
    assert found.shape == (2, len(classes) or 512)
    torch.testing.assert_close(found, model.outputs(inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("resnet18", {"stem": "cifar"}, "network.stem=cifar"),
        ("resnet18", {"width": 2}, "network.width=2"),
        ("test_resnet", {}, "test_resnet"),
    ],
)
def test_other_networks_are_refused(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(CannotRepresent, match=f"--to torchvision .*{named}.*--to onnx"):
        torchvision_format.check(exportable.model(name, 32, on="meta", **options))


def test_refusal_names_timm_if_it_can_represent_the_network() -> None:
    official = exportable.model("resnet50", 16, on="meta", variant="official")
    with pytest.raises(CannotRepresent, match=r"variant=official.*--to timm"):
        torchvision_format.check(official)
    with pytest.raises(CannotRepresent, match="stem=cifar") as caught:
        torchvision_format.check(exportable.model("resnet18", 16, on="meta", stem="cifar"))
    assert "--to timm" not in str(caught.value)
