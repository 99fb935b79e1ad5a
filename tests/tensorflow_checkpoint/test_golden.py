"""Checkpoints that TensorFlow wrote give TensorFlow's features and outputs of heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from torch import Tensor, nn

from compressive.networks import Ema, SamePool, linear, mlp
from compressive.tensorflow_checkpoint.find import find_prefix
from compressive.tensorflow_checkpoint.official_model import OfficialModel

FOLDER = GOLDEN / "tensorflow"
HIDDEN, OUT = 8, 6  # of the heads


def narrow_resnet(name: str, channels: int = 2) -> nn.Module:
    """Build the official ResNet with fewer channels than `networks.backbone` can."""
    stages = tuple(channels * 2**i for i in range(4))
    network: Any = timm.create_model(
        name, num_classes=0, channels=stages, stem_type="deep", stem_width=channels // 2
    )
    network.conv1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    network.maxpool = SamePool()
    if network.layer1[0].downsample is None:
        project = nn.Conv2d(channels, channels, 1, bias=False)
        network.layer1[0].downsample = nn.Sequential(project, nn.BatchNorm2d(channels))
    return network


def images() -> Tensor:
    pixels = np.random.RandomState(0).randn(2, 64, 64, 3).astype(np.float32)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def expected(case: str) -> dict[str, Tensor]:
    with np.load(FOLDER / "outputs.npz") as arrays:
        start = f"{case}/"
        return {
            key.removeprefix(start): torch.from_numpy(arrays[key])
            for key in arrays.files
            if key.startswith(start)
        }


def check(got: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@torch.no_grad()
def test_c_byol_checkpoint_has_the_features_and_heads_of_tensorflow() -> None:
    model, wanted = OfficialModel(find_prefix(FOLDER / "c-byol")), expected("c-byol")
    assert (model.methods, model.step) == (("c-byol",), 312_785)
    assert (model.projection_sizes, model.classifier_shape) == ((64, HIDDEN, OUT), (OUT, 5))
    whole = nn.Module()
    whole.encoder = encoder = narrow_resnet("resnet50")
    whole.projection = projection = mlp(64, HIDDEN, OUT)
    whole.predictor = predictor = mlp(OUT, HIDDEN, OUT)
    whole.decoder = decoder = linear(OUT, OUT)
    whole.backward_encoder = backward = mlp(OUT, HIDDEN, OUT)
    whole.target = target = Ema(nn.Sequential(narrow_resnet("resnet50"), mlp(64, HIDDEN, OUT)))
    whole.classifier = classifier = nn.Linear(OUT, 5)
    backbone = {f"encoder.{name}": value for name, value in model.encoder_weights().items()}
    whole.load_state_dict(backbone | model.head_weights())
    whole.eval()
    features = encoder(images())
    check(features, wanted["features"])
    r = projection(features)
    check(r, wanted["projection"])
    check(classifier(r), wanted["logits"])
    mu = F.normalize(predictor(r), dim=-1)
    check(mu, wanted["mean"])
    check(decoder(mu), wanted["prediction"])
    t = target(images())
    check(t, wanted["target"])
    check(backward(F.normalize(t, dim=-1)), wanted["backward"])


@torch.no_grad()
def test_exported_model_is_read_by_its_object_graph() -> None:
    """Names there are positions in a list: `variables_list/12`."""
    model, wanted = OfficialModel(find_prefix(FOLDER / "exported")), expected("exported")
    assert (model.methods, model.step) == (("simclr", "c-simclr"), None)
    assert (model.classifier_shape, model.unknown_heads) == ((16, 5), ())
    network: Any = narrow_resnet("resnet18")
    network.load_state_dict(model.encoder_weights())
    features = network.eval()(images())
    check(features, wanted["features"])
    heads = model.head_weights()
    projection = mlp(16, HIDDEN, OUT).eval()
    projection.load_state_dict(
        {n.removeprefix("projection."): w for n, w in heads.items() if n.startswith("projection.")}
    )
    check(projection(features), wanted["projection"])
    logits = F.linear(features, heads["classifier.weight"], heads["classifier.bias"])
    check(logits, wanted["logits"])
    network.maxpool = nn.MaxPool2d(3, 2, padding=1)  # torch's differs by more than the tolerance
    with pytest.raises(AssertionError):
        check(network(images()), wanted["features"])


@pytest.mark.parametrize(
    "place",
    ["c-byol", "c-byol/ckpt-1", "c-byol/ckpt-1.index", "c-byol/ckpt-1.data-00000-of-00001"],
)
def test_folder_prefix_and_files_name_the_checkpoint(place: str) -> None:
    assert find_prefix(FOLDER / place) == FOLDER / "c-byol" / "ckpt-1"


def test_folder_of_an_exported_model_is_found() -> None:
    assert find_prefix(str(FOLDER / "exported")) == FOLDER / "exported" / "variables" / "variables"


def test_golden_files_are_small() -> None:
    files: list[Path] = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < 1_500_000
