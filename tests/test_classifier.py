"""Files of fine-tuned classifiers."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from compressive import encoder
from compressive.classifier import Classifier, load_classifier, save_classifier
from compressive.config import Network
from compressive.encoder import Encoder
from compressive.evaluation.frozen_model import load_encoder
from compressive.networks import build, feature_dim
from compressive.rundir.files import CLASSIFIER

CLASSES = ("cat", "dog", "emu")


def make(classes: tuple[str, ...] = CLASSES, **views) -> Classifier:
    torch.manual_seed(0)
    settings = Network(name="test_resnet")
    network = build(settings, 32)
    inside = Encoder(network, settings, 32, 64, **views)
    head = nn.Linear(feature_dim(network), len(classes))
    return Classifier(inside, head, classes).eval()


def test_a_saved_classifier_returns_the_same_logits(tmp_path: Path) -> None:
    made = make(antialias=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1))
    images = torch.randint(0, 256, (2, 3, 50, 40), dtype=torch.uint8)
    save_classifier(tmp_path / CLASSIFIER, made)
    for place in (tmp_path, tmp_path / CLASSIFIER, str(tmp_path)):
        found = load_classifier(place)
        assert found.classes == CLASSES
        logits = [each(each.encoder.preprocess(images)) for each in (found, made)]
        assert torch.equal(*logits)
        assert not any(weight.requires_grad for weight in found.parameters())


def test_weights_have_the_names_of_timm(tmp_path: Path) -> None:
    made = make()
    path = save_classifier(tmp_path / CLASSIFIER, made)
    weights = load_file(path)
    assert torch.equal(weights.pop("classifier.weight"), made.head.weight)
    assert torch.equal(weights.pop("classifier.bias"), made.head.bias)
    timm.create_model("test_resnet", num_classes=0).load_state_dict(weights)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == list(CLASSES)


def test_equal_classifiers_have_equal_files(tmp_path: Path) -> None:
    one, two = (save_classifier(tmp_path / name, make()) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


def test_an_encoder_keeps_its_normalization(tmp_path: Path) -> None:
    inside = make().encoder
    channels: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    encoder.save(tmp_path, inside.network, inside.settings, 32, 64, **channels)
    found = encoder.load(tmp_path)
    assert (found.mean, found.std) == (channels["mean"], channels["std"])


def test_a_damaged_classifier_is_rejected(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / CLASSIFIER, make())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=CLASSIFIER):
        load_classifier(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum"):
        load_classifier(path)


@pytest.mark.parametrize("classes", [("cat", "cat", "emu"), ("cat",)])
def test_invalid_classes_are_rejected(tmp_path: Path, classes: tuple[str, ...]) -> None:
    save_classifier(tmp_path / CLASSIFIER, make(classes))
    with pytest.raises(ValueError, match="classes"):
        load_classifier(tmp_path)


def test_values_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    made = make()
    nn.init.constant_(made.head.bias, float("nan"))
    save_classifier(tmp_path / CLASSIFIER, made)
    with pytest.raises(ValueError, match=r"classifier\.bias"):
        load_classifier(tmp_path)


def test_a_head_of_another_shape_is_rejected() -> None:
    made = make()
    with pytest.raises(ValueError, match=r"\(2, "):
        Classifier(made.encoder, made.head, ("cat", "dog"))


def test_an_encoder_is_no_classifier(tmp_path: Path) -> None:
    inside = make().encoder
    path = encoder.save(tmp_path, inside.network, inside.settings, 32, 64)
    with pytest.raises(FileNotFoundError, match="finetune"):
        load_classifier(tmp_path)
    with pytest.raises(ValueError, match="finetune"):
        load_classifier(path)
    with pytest.raises(FileNotFoundError, match=CLASSIFIER):
        load_classifier(tmp_path / "nothing")


def test_a_classifier_is_no_encoder(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / CLASSIFIER, make())
    with pytest.raises(ValueError, match="classifier"):
        load_encoder(path)
