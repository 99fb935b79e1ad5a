"""All variables of full-size official checkpoints have a place, by name and shape."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from conftest import GOLDEN
from tensorflow_files import ENDING, Claimed, write_bundle

from compressive.config import Network
from compressive.tensorflow_checkpoint import names
from compressive.tensorflow_checkpoint.convert import method_shapes
from compressive.tensorflow_checkpoint.official_model import OfficialModel
from compressive.tensorflow_checkpoint.tensor_bundle import TensorBundle

SHARED = Path(__file__).parents[3] / "shared" / "golden" / "checkpoint_keys"
BLOCK = re.compile(r"block_groups/(\d)/layers/(\d+)/")
Shapes = dict[str, tuple[int, ...]]


def opened(tmp_path: Path, shapes: Mapping[str, tuple[int, ...]]) -> OfficialModel:
    """Return the model of an index with these shapes and no weights."""
    return OfficialModel(
        write_bundle(tmp_path / "ckpt", {n: Claimed(s) for n, s in shapes.items()})
    )


def check(model: OfficialModel, network: Network) -> None:
    """Check names and shapes of all networks, and settings."""
    assert model.network == network
    assert model.unknown_heads == ()
    expected = method_shapes(model.methods[0], network, 224)
    model.check_shapes(expected)
    own = {f"encoder.{name}" for name in model._backbone_paths}
    heads = {name for part in model.heads for name in part.paths}
    counted = {name for name in expected if not name.endswith("num_batches_tracked")}
    assert (own | heads) - {"classifier.weight", "classifier.bias"} == counted


def parts(model: OfficialModel) -> set[str]:
    return {name.partition(".")[0] for part in model.heads for name in part.paths}


def wider(name: str, shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Multiply the channels of a backbone; of heads only the input of the first layer."""
    if "resnet" in name:
        kept = shape[:2] if len(shape) == 4 else ()
        return *kept, *(side if side == 3 else factor * side for side in shape[len(kept) :])
    is_first = re.search(r"_head/linear_layers/0/dense/kernel", name)
    return (factor * shape[0], *shape[1:]) if is_first else shape


@cache
def golden_shapes() -> Shapes:
    """Return names of the small C-BYOL checkpoint, with the shapes of ResNet-50."""
    bundle = TensorBundle(GOLDEN / "tensorflow" / "c-byol" / "ckpt-1")
    found: Shapes = {}
    for name, entry in bundle.entries.items():
        if "SLOT" in name or not name.startswith("model/"):
            continue
        shape = wider(name, entry.shape, 32)
        if "resnet" not in name and "supervised" not in name:
            sizes = {8: 4096, 6: 256, 64 * 32: 64 * 32}
            shape = tuple(sizes[side] for side in shape)
        found[name] = shape
    return found


def deeper(shapes: Shapes, blocks: tuple[int, ...]) -> Shapes:
    """Repeat the last block of a group until it has the given number of blocks."""
    found = dict(shapes)
    for name, shape in shapes.items():
        match = BLOCK.search(name)
        if match and int(match[2]) == (2, 3, 5, 2)[int(match[1])]:
            for block in range(int(match[2]) + 1, blocks[int(match[1])]):
                there = f"block_groups/{match[1]}/layers/{block}/"
                found[name.replace(match[0], there)] = shape
    return found


@pytest.mark.parametrize(
    ("blocks", "name", "width"),
    [
        ((3, 4, 6, 3), "resnet50", 1),
        pytest.param((3, 4, 6, 3), "resnet50", 2, marks=pytest.mark.slow),
        pytest.param((3, 4, 23, 3), "resnet101", 1, marks=pytest.mark.slow),
        pytest.param((3, 8, 36, 3), "resnet152", 1, marks=pytest.mark.slow),
    ],
)
def test_depth_and_width_are_found(
    blocks: tuple[int, ...], name: str, width: int, tmp_path: Path
) -> None:
    shapes = deeper(golden_shapes(), blocks)
    shapes = {key: wider(key, shape, width) for key, shape in shapes.items()}
    check(opened(tmp_path, shapes), Network(name=name, width=width, variant="official"))


def test_predictor_and_backward_encoder_tell_the_methods_apart(tmp_path: Path) -> None:
    shapes = {n: s for n, s in golden_shapes().items() if not re.search("block_groups/[1-3]", n)}
    assert opened(tmp_path / "a", shapes).methods == ("c-byol",)
    plain = {n: s for n, s in shapes.items() if "_target_projector" not in n}
    stochastic = {n: s for n, s in plain.items() if "_projector/linear_layers/3" not in n}
    byol = {n.replace("layers/2/dense", "layers/1/dense"): s for n, s in stochastic.items()}
    assert opened(tmp_path / "d", plain).methods == ("byol",)
    backward = {n: s for n, s in shapes.items() if "_target_projector" in n}
    assert opened(tmp_path / "e", byol | backward).methods == ("byol",)
    model = opened(tmp_path / "b", byol)
    assert model.methods == ("byol",)
    assert parts(model) == {"projection", "predictor", "target", "classifier"}
    simclr = {n: s for n, s in byol.items() if "target" not in n and "_projector" not in n}
    model = opened(tmp_path / "c", simclr)
    assert model.methods == ("simclr", "c-simclr")
    assert parts(model) == {"projection", "classifier"}


def test_cifar_stem_is_found(tmp_path: Path) -> None:
    shapes = {n: s for n, s in golden_shapes().items() if "/_resnet/" in n}
    shapes[f"model/_resnet/{names.STEM_KERNEL}{ENDING}"] = (3, 3, 3, 64)
    assert opened(tmp_path, shapes).network.stem == "cifar"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "methods"),
    [("csimclr_r50_keys", ("simclr", "c-simclr")), ("cbyol_r50_keys", ("c-byol",))],
)
def test_keys_of_official_checkpoints_have_a_place(
    file: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    keys = json.loads((SHARED / f"{file}.json").read_text())["keys"]
    shapes = {name: tuple(shape) for name, shape in keys if "SLOT" not in name}
    shapes.pop("_CHECKPOINTABLE_OBJECT_GRAPH")
    model = opened(tmp_path, shapes)
    assert model.methods == methods
    assert model.classifier_shape == (256, 1000)
    check(model, Network(variant="official"))
    placed = {f"_resnet/{path}" for path in model._backbone_paths.values()}
    placed |= {f"{part.attribute}/{path}" for part in model.heads for path in part.paths.values()}
    counters = {"global_step", "save_counter"}
    assert {f"model/{path}{ENDING}" for path in placed} == {
        name for name in shapes if name.removesuffix(ENDING) not in counters
    }
