"""The Hugging Face folder loads in timm and transformers, and with its image processor."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import exportable
import pytest
import timm.data
import torch
from run_files import config_text
from tiny import noise, sorted_photos

import compressive
from compressive.exporting import huggingface

FILES = ["README.md", "config.json", "export.json", "model.safetensors", "preprocessor_config.json"]


@pytest.fixture
def transformers() -> Any:
    """Import it by name, because its lazy modules cost the type checker ten seconds."""
    return import_module("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_folder_loads_in_timm_and_transformers(
    half: bool, transformers: Any, tmp_path: Path
) -> None:
    place = exportable.encoder_file(tmp_path / "run", size=40)
    out = tmp_path / "out"
    done = compressive.export(place, "huggingface", out, half=half, images=sorted_photos())
    assert sorted(path.name for path in out.iterdir()) == FILES
    network = transformers.AutoModel.from_pretrained(out)
    inputs = torch.randn(2, 3, 40, 40)
    expected = compressive.load(place)(inputs)
    with torch.inference_mode():
        found = network.eval()(pixel_values=inputs).pooler_output
    assert (found - expected).abs().max() <= done.parity.tolerance * expected.abs().max()
    assert found.dtype == torch.float32
    readme = (out / "README.md").read_text()
    assert f"{json.loads(done.record.read_text())['preprocessing_difference']:.1e}" in readme


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_image_processor_is_the_transform_of_timm(
    file: str, transformers: Any, tmp_path: Path
) -> None:
    """A folder is read from config.json, a repository from preprocessor_config.json."""
    model = exportable.model(size=40)
    huggingface.write(model, tmp_path, half=False, with_preprocessing=False)
    processor = transformers.AutoImageProcessor.from_pretrained(
        tmp_path, image_processor_filename=file
    )
    network = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    config = timm.data.resolve_model_data_config(network)
    transform: Any = timm.data.create_transform(**config)
    image = noise(50, 60)
    assert torch.equal(processor(image)["pixel_values"][0], transform(image))
    assert tuple(config["input_size"]) == (3, 40, 40)


@pytest.mark.slow
def test_classifier_has_its_labels_in_transformers(transformers: Any, tmp_path: Path) -> None:
    model = exportable.model(classes=("cat", "dog"))
    huggingface.write(model, tmp_path, half=False, with_preprocessing=False)
    inputs = torch.randn(2, 3, 16, 16)
    found = huggingface.outputs(model, tmp_path, [inputs])
    for loader in ("timm", "transformers"):
        torch.testing.assert_close(found[loader][0], model.outputs(inputs), rtol=1e-5, atol=1e-5)
    network = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert network.config.id2label == {0: "cat", 1: "dog"}


@pytest.mark.slow
def test_config_of_a_run_is_not_that_of_transformers(transformers: Any, tmp_path: Path) -> None:
    settings = {"method": "simclr", "network": {"name": "resnet18"}, "about": {}}
    (tmp_path / "config.json").write_text(config_text(settings))
    with pytest.raises(ValueError, match="model_type"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_processor_settings_describe_the_original_preprocessing(tmp_path: Path) -> None:
    huggingface.write(exportable.model(side=48), tmp_path, half=False, with_preprocessing=False)
    found = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert found["compressive"]["shrink_longer_side_to"] == 48
    assert found["compressive"]["antialias"] is False
