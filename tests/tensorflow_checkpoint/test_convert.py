"""A converted checkpoint is an encoder that `load`, `embed` and `evaluate` read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from safetensors import safe_open
from safetensors.torch import load_file
from tensorflow_files import official_tensors, write_bundle
from tiny import noise

import compressive
from compressive.config import Network
from compressive.networks import backbone

pytestmark = pytest.mark.slow  # the smallest network that fits has 45 MB
BLOCKS = (2, 2, 2, 2)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a ResNet-18 and the prefix of its checkpoint, in two shards."""
    torch.manual_seed(0)
    network = backbone("resnet18", stem="cifar", variant="official", zero_init_last=False)
    for name, value in network.named_buffers():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5) if name.endswith("var") else value.normal_(0, 0.1)
    dense = np.random.RandomState(0).randn(512, 10).astype(np.float32)
    more = {
        "global_step": np.array(1000),
        "model/supervised_head/linear_layer/dense/kernel": dense,
        "model/supervised_head/linear_layer/dense/bias": np.zeros(10, np.float32),
        "model/_kappa_head/kernel": np.ones((2, 2), np.float32),
    }
    folder = tmp_path_factory.mktemp("official")
    tensors = official_tensors(network, BLOCKS, **more)
    return network.eval(), write_bundle(folder / "ckpt-1000", tensors, shards=2)


def test_command_reports_the_content_and_writes_an_encoder(official: Any, tmp_path: Path) -> None:
    network, prefix = official
    path = tmp_path / "new" / "encoder.safetensors"
    result = run(f"convert {prefix.parent} --out {path}")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("found: simclr or c-simclr, resnet18, CIFAR stem, input 32 px")
    assert "step 1,000" in lines[0]
    assert "networks: encoder, classifier" in lines
    assert any("same variables" in line for line in lines)
    assert any("10 classes on the 512-dimensional features" in line for line in lines)
    assert any(line.endswith("left out: _kappa_head") for line in lines)
    assert lines[-1] == f"next: compressive evaluate {path} --data IMAGENET"
    encoder = compressive.load(path)
    assert encoder.settings == Network(
        name="resnet18", stem="cifar", variant="official", head_layers=1
    )
    images = encoder.preprocess([noise(40, 50)])
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), network(images), rtol=0, atol=0)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["methods"]) == ["simclr", "c-simclr"]
    assert (metadata["source"], metadata["step"]) == ("ckpt-1000", "1000")
    assert sorted(child.name for child in path.parent.iterdir()) == ["encoder.safetensors"]


def test_heads_are_written_with_the_encoder(official: Any, tmp_path: Path) -> None:
    network, _ = official
    dense = np.random.RandomState(1).randn(512, 10).astype(np.float32)
    more = {
        "model/supervised_head/linear_layer/dense/kernel": dense,
        "model/supervised_head/linear_layer/dense/bias": np.ones(10, np.float32),
    }
    write_bundle(tmp_path / "ckpt", official_tensors(network, BLOCKS, **more))
    found = compressive.convert(
        tmp_path, tmp_path / "e.safetensors", heads=tmp_path / "h.safetensors"
    )
    assert (found.classifier, found.classifier_input) == ((512, 10), "features")
    assert (found.step, found.parts, found.ignored) == (None, ("classifier",), ())
    assert found.heads is not None
    heads = load_file(found.heads)
    np.testing.assert_array_equal(heads["classifier.weight"].numpy(), dense.T)
    again = compressive.convert(tmp_path / "ckpt", tmp_path / "again.safetensors")
    assert again.path.read_bytes() == found.path.read_bytes()
    assert again.fingerprint == found.fingerprint


def test_converted_encoder_is_evaluated_and_embedded(official: Any, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    compressive.convert(official[1], path)
    for label in ("a", "b"):
        for split in ("train", "val"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for i in range(4):
                image = noise(40, 50, seed=i + 10 * (label == "a"))
                image.save(tmp_path / "images" / split / label / f"{i}.png")
    common = f"{path} --device cpu"
    out = tmp_path / "results"
    result = run(f"evaluate {common} --data {tmp_path}/images --tasks geometry --out {out}")
    assert result.exit_code == 0, result.output
    assert (out / "results.json").is_file()
    result = run(f"embed {common} {tmp_path}/images/train --out {tmp_path}/features.npz")
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "features.npz")["features"].shape == (8, 512)
