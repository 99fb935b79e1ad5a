"""ONNX and torch.export: any batch size and image size, half precision, no package needed."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
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


Exporter = Callable[[Any, str], tuple[ExportModel, Path]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """Return a function that exports each variant once, because an export takes seconds."""

    @functools.cache
    def export(kind: Any, variant: str) -> tuple[ExportModel, Path]:
        model = {
            "classifier": lambda: exportable.model(classes=("a", "b")),
            "preprocessing": exportable.model,
            "half": lambda: exportable.model("resnet18", 32),  # its weights are most of the file
        }[variant]()
        path = tmp_path_factory.mktemp("exported") / "encoder.pt2"
        options = {"half": variant == "half", "with_preprocessing": variant == "preprocessing"}
        kind.write(model, path, **options)
        return model, path

    return export


KINDS = pytest.mark.parametrize("kind", [onnx_format, torch_export], ids=["onnx", "torch-export"])


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("variant", ["classifier", "preprocessing", "half"])
def test_graph_computes_the_outputs_for_any_batch(
    kind: Any, variant: str, exported: Exporter
) -> None:
    (model, path), half = exported(kind, variant), variant == "half"
    for images in (IMAGES, IMAGES[:1], IMAGES[:, :, :20, :16]):
        inputs = model.encoder.preprocess(images)
        found = run(kind, model, path, images if variant == "preprocessing" else inputs)
        expected = model.outputs(inputs)
        assert (found - expected).abs().max() <= (1e-2 if half else 1e-5) * expected.abs().max()
        assert half == bool((found - expected).abs().max() > 1e-5 * expected.abs().max())


@pytest.mark.slow
@KINDS
def test_half_halves_the_file(kind: Any, exported: Exporter) -> None:
    """The weights alone, as float32, are smaller than a file with graph and weights."""
    model, path = exported(kind, "half")
    weights = sum(value.nbytes for value in model.encoder.parameters())
    assert path.stat().st_size < 0.55 * weights


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stem": "cifar", "width": 2}, {"variant": "official"}])
def test_networks_that_timm_lacks_are_exported_to_onnx(
    options: dict[str, Any], tmp_path: Path
) -> None:
    place = exportable.encoder_file(tmp_path / "run", name="resnet18", size=32, **options)
    images = photos(tmp_path / "p", 3)
    done = compressive.export(place, "onnx", tmp_path / "encoder.onnx", images=images)
    assert done.parity.difference < 1e-5


@pytest.mark.slow
def test_onnx_file_has_the_newest_opset_and_names(exported: Exporter) -> None:
    import onnx

    found = onnx.load(exported(onnx_format, "classifier")[1])
    assert [each.version for each in found.opset_import if not each.domain] == [onnx_format.OPSET]
    assert [each.name for each in found.graph.input] == ["images"]
    assert [each.name for each in found.graph.output] == ["logits"]
    metadata = {each.key: each.value for each in found.metadata_props}
    assert json.loads(metadata["classes"]) == ["a", "b"]


@pytest.mark.slow
def test_program_loads_without_this_package(exported: Exporter) -> None:
    _, path = exported(torch_export, "preprocessing")
    code = "import sys, torch; sys.modules['compressive'] = sys.modules['timm'] = None; "
    code += f"print(torch.export.load({str(path)!r}).module()"
    code += "(torch.zeros(5, 3, 9, 11, dtype=torch.uint8)).shape[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "5", done.stderr


@pytest.mark.slow
def test_program_that_needs_this_package_is_an_error(
    exported: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = torch_export._LOAD.replace("import torch\n", "import torch, compressive\n", 1)
    monkeypatch.setattr(torch_export, "_LOAD", needs)
    with pytest.raises(ValueError, match="compressive"):
        torch_export.outputs(*exported(torch_export, "classifier"), [torch.zeros(1, 3, 16, 16)])


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
