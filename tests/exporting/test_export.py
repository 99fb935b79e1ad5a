"""`compressive export` and `compressive.export`: record, parity check and bad input."""

import json
from pathlib import Path
from typing import Any

import exportable
import pytest
import timm
import torch
from command_line import error_line, run
from run_files import config_text
from safetensors.torch import load_file, save_file
from tiny import sorted_photos

import compressive
from compressive.classifier import Classifier, save_classifier
from compressive.exporting import timm_format


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exportable.encoder_file(tmp_path_factory.mktemp("encoder"))


def test_record_states_origin_and_difference(encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(f"export {encoder} --to timm --out {out} --images {sorted_photos()}")
    assert done.exit_code == 0, done.output
    found = json.loads((out / "export.json").read_text())
    assert (found["format"], found["source"]) == ("timm", str(encoder))
    assert (found["image_count"], found["images"]) == (8, str(sorted_photos()))
    assert 0 <= found["largest_difference"] <= found["tolerance"] == 1e-4
    assert found["versions"]["timm"] == timm.__version__
    assert set(found["files"]) == {"config.json", "model.safetensors"}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("largest difference")]
    assert f"{found['largest_difference']:.1e}" in line
    assert f"local-dir:{out}" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_half_has_a_larger_tolerance(encoder: Path, tmp_path: Path) -> None:
    images = sorted_photos()
    done = compressive.export(encoder, "timm", tmp_path / "out", half=True, images=images)
    assert 0 < done.parity.difference < done.parity.tolerance == 1e-2
    assert json.loads(done.record.read_text())["half"] is True


def test_preprocessing_of_timm_that_differs_is_noted(tmp_path: Path) -> None:
    place = exportable.encoder_file(tmp_path / "run", size=40)  # crops, unlike up to 32 pixels
    done = compressive.export(place, "timm", tmp_path / "out", images=sorted_photos())
    found = json.loads(done.record.read_text())["preprocessing_difference"]
    assert found > 1e-3
    assert f"{found:.2g}" in done.notes[0]


def test_wrong_export_is_deleted(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = timm_format.write_folder

    def write_wrong(model: Any, path: Path, found: timm_format.TimmModel) -> None:
        key = "bn1.weight"
        write(model, path, found._replace(weights=found.weights | {key: 1.01 * found.weights[key]}))

    monkeypatch.setattr(timm_format, "write_folder", write_wrong)
    text = error_line(f"export {encoder} --to timm --out {tmp_path}/o --images {sorted_photos()}")
    assert "0.0001" in text
    assert not list(tmp_path.iterdir())


def test_nan_weights_are_refused(encoder: Path, tmp_path: Path) -> None:
    weights = load_file(encoder)
    weights["bn1.bias"][0] = torch.nan
    wrong = tmp_path / "wrong.safetensors"
    save_file(weights, wrong)
    text = error_line(f"export {wrong} --network test_resnet --to timm --out {tmp_path}/out")
    assert "bn1.bias" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--to onx --out x", "onnx"),
        ("--to timm", "--out"),
        ("--to onnx --out x", ".onnx"),
        ("--to timm --out x --push a/b", "--push"),
        ("--to torchvision --out x.pth", "test_resnet"),
        ("--to timm --out .", "--out"),
    ],
)
def test_bad_input_is_one_line(
    words: str, named: str, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in error_line(f"export {encoder} {words}")
    assert not list(tmp_path.iterdir())


def test_export_into_a_run_folder_is_refused(encoder: Path) -> None:
    assert "run" in error_line(f"export {encoder} --to timm --out {encoder.parent}")


def test_missing_encoder_is_one_line(tmp_path: Path) -> None:
    assert "nowhere" in error_line(f"export {tmp_path}/nowhere --to timm --out {tmp_path}/out")


def test_config_of_a_run_is_not_read_as_that_of_timm(tmp_path: Path) -> None:
    settings = {"method": "simclr", "network": {"name": "resnet18"}, "about": {}}
    (tmp_path / "config.json").write_text(config_text(settings))
    with pytest.raises(KeyError, match="architecture"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


@pytest.mark.parametrize("name", ["", "classifier.safetensors"])
def test_classifier_is_exported_with_its_classes(name: str, tmp_path: Path) -> None:
    encoder = exportable.model().encoder
    head = torch.nn.Linear(encoder.feature_dim, 2)
    (tmp_path / "run").mkdir()
    place = tmp_path / "run" / "classifier.safetensors"
    save_classifier(place, Classifier(encoder, head, ("cat", "dog")))
    done = compressive.export(
        tmp_path / "run" / name, "timm", tmp_path / "out", images=sorted_photos()
    )
    assert json.loads(done.record.read_text())["classes"] == ["cat", "dog"]
    network = timm.create_model(f"local-dir:{done.path}", pretrained=True).eval()
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
