"""ONNX and torch.export: any batch size and image size, half precision, no package needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import exportable
import pytest
import torch
from tiny import photos

import compressive
from compressive.exporting import graph, onnx_format, torch_export
from compressive.exporting.formats import _GRAPH_TORCH, CannotRepresent
from compressive.exporting.model import ExportModel

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < _GRAPH_TORCH, reason="needs a newer torch"
)
IMAGES = torch.randint(0, 256, (3, 3, 41, 57), dtype=torch.uint8)


def run(kind: Any, model: ExportModel, path: Path, inputs: torch.Tensor) -> torch.Tensor:
    """Return outputs; of torch.export in this process, because starting one takes seconds."""
    if kind is torch_export:
        return torch.export.load(path).module()(inputs)
    return kind.outputs(model, path, [inputs])["onnxruntime"][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [onnx_format, torch_export], ids=["onnx", "torch-export"])
@pytest.mark.parametrize(
    ("with_preprocessing", "half"), [(False, False), (True, False), (False, True)]
)
def test_graph_computes_the_features_for_any_batch(
    kind: Any, with_preprocessing: bool, half: bool, tmp_path: Path
) -> None:
    model, path = exportable.model(), tmp_path / "encoder.pt2"
    kind.write(model, path, half=half, with_preprocessing=with_preprocessing)
    for images in (IMAGES, IMAGES[:1], IMAGES[:, :, :20, :16]):
        inputs = model.encoder.preprocess(images)
        found = run(kind, model, path, images if with_preprocessing else inputs)
        expected = model.outputs(inputs)
        assert (found - expected).abs().max() <= (1e-2 if half else 1e-5) * expected.abs().max()
        assert half == bool((found - expected).abs().max() > 1e-5 * expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [onnx_format, torch_export], ids=["onnx", "torch-export"])
def test_half_halves_the_file(kind: Any, tmp_path: Path) -> None:
    model, sizes = exportable.model("resnet18", 32), []
    for half in (False, True):
        kind.write(model, tmp_path / "a.pt2", half=half, with_preprocessing=False)
        sizes.append((tmp_path / "a.pt2").stat().st_size)
    assert sizes[1] < 0.55 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stem": "cifar"}, {"width": 2}, {"variant": "official"}])
def test_networks_that_timm_lacks_are_exported_to_onnx(
    options: dict[str, Any], tmp_path: Path
) -> None:
    place = exportable.encoder_file(tmp_path / "run", name="resnet18", size=32, **options)
    images = photos(tmp_path / "p", 3)
    done = compressive.export(place, "onnx", tmp_path / "encoder.onnx", images=images)
    assert done.parity.difference < 1e-5


@pytest.mark.slow
def test_onnx_file_has_the_newest_opset_and_names(tmp_path: Path) -> None:
    import onnx

    model = exportable.model(classes=("a", "b"))
    onnx_format.write(model, tmp_path / "a.onnx", half=False, with_preprocessing=False)
    found = onnx.load(tmp_path / "a.onnx")
    assert [each.version for each in found.opset_import if not each.domain] == [onnx_format.OPSET]
    assert [each.name for each in found.graph.input] == ["images"]
    assert [each.name for each in found.graph.output] == ["logits"]
    metadata = {each.key: each.value for each in found.metadata_props}
    assert json.loads(metadata["classes"]) == ["a", "b"]


@pytest.mark.slow
def test_program_loads_without_this_package(tmp_path: Path) -> None:
    model, path = exportable.model(), tmp_path / "a.pt2"
    torch_export.write(model, path, half=False, with_preprocessing=True)
    code = "import sys, torch; sys.modules['compressive'] = sys.modules['timm'] = None; "
    code += f"print(torch.export.load({str(path)!r}).module()"
    code += "(torch.zeros(5, 3, 9, 11, dtype=torch.uint8)).shape[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "5", done.stderr


@pytest.mark.slow
def test_program_that_needs_this_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = exportable.model(), tmp_path / "a.pt2"
    torch_export.write(model, path, half=False, with_preprocessing=False)
    needs = torch_export._LOAD.replace("import torch\n", "import torch, compressive\n", 1)
    monkeypatch.setattr(torch_export, "_LOAD", needs)
    with pytest.raises(ValueError, match="compressive"):
        torch_export.outputs(model, path, [torch.zeros(1, 3, 16, 16)])


def test_graph_is_a_copy_of_the_network() -> None:
    model = exportable.model()
    made = graph.make_graph(model, with_preprocessing=False, half=True)
    inputs = torch.randn(2, 3, 16, 16)
    assert {p.dtype for p in made.parameters() if p.ndim > 1} == {torch.float16}
    assert {p.dtype for p in model.encoder.parameters()} == {torch.float32}
    found, expected = made(inputs), model.outputs(inputs)
    assert 0 < (found - expected).abs().max() < 1e-2 * expected.abs().max()


def test_weights_above_the_limit_of_onnx_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_format, "_MOST_BYTES", 1000)
    with pytest.raises(CannotRepresent, match=r"--to onnx .*--to torch-export"):
        onnx_format.check(exportable.model(on="meta"))
