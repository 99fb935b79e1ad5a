"""An encoder is the same whichever way it comes: from a run, a file of weights, or timm."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from tiny import silent, tiny
from torch import Tensor

from compressive import encoder
from compressive.augment.ops import MEAN, STD
from compressive.config import Config
from compressive.evaluation.frozen_model import open_model
from compressive.evaluation.pretrained import read_weights, with_weights
from compressive.methods import build
from compressive.train.loop import pretrain

CPU = torch.device("cpu")


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("method=c-byol"), out, display=silent())
    return out


@pytest.mark.slow
def test_a_run_has_its_encoder_and_the_heads_behind_it(run: Path) -> None:
    model = open_model(str(run), CPU)
    assert model.method is not None
    assert model.config == tiny("method=c-byol")
    assert (model.size, model.feature_dim) == (16, 96)
    with torch.no_grad():
        h = model.network(images(16))
        torch.testing.assert_close(model.method.encoder(images(16)), h, rtol=0, atol=0)
    assert not any(p.requires_grad for p in model.method.parameters())


@pytest.mark.slow
def test_heads_of_other_weights_are_not_offered_until_the_run_has_gone_on(
    run: Path, tmp_path: Path
) -> None:
    """As where it was killed after the checkpoint and before the encoder."""
    out = shutil.copytree(run, tmp_path / "a")
    before = encoder.load(out)
    weight = next(before.network.parameters())
    weight.data.view(-1)[0] += 1e-3
    encoder.save(out, before.network, before.settings, before.size, before.side)
    model = open_model(str(out), CPU)
    assert model.method is None
    assert "encoder.safetensors" in model.why_no_method
    assert torch.equal(next(model.network.parameters()), weight)
    pretrain(tiny("method=c-byol"), out, display=silent())
    model = open_model(str(out), CPU)
    assert model.method is not None
    assert model.why_no_method == ""


def test_our_file_of_weights_is_the_same_encoder(run: Path) -> None:
    model = open_model(str(run / "encoder.safetensors"), CPU)
    whole = open_model(str(run), CPU)
    with torch.no_grad():
        torch.testing.assert_close(
            model.network(images(16)), whole.network(images(16)), rtol=0, atol=0
        )
    assert model.method is None


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torchvisions_weights_give_torchvisions_features(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(weights=None).eval()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(theirs.state_dict(), path)
    else:
        save_file(theirs.state_dict(), path)
    model = open_model(str(path), CPU)
    assert "resnet18" in model.name
    assert (model.size, model.mean, model.std) == (224, MEAN, STD)
    theirs.fc = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        # Summed in another order: channels last.
        expected, found = theirs(images(64)), model.network(images(64))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_inside_a_training_scripts_file_are_found(tmp_path: Path) -> None:
    network = timm.create_model("resnet18", num_classes=5)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "a.pth")
    found = with_weights(read_weights(tmp_path / "a.pth"))
    assert found.name == "resnet18"
    assert torch.equal(found.network.state_dict()["conv1.weight"], state["module.conv1.weight"])


@pytest.mark.slow
def test_a_named_network_takes_its_own_weights_only(tmp_path: Path) -> None:
    network = timm.create_model("test_vit", num_classes=0)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), CPU, network="test_vit")
    assert "test_vit" in model.name
    with pytest.raises(ValueError, match="not those of timm's resnet18: conv1"):
        open_model(str(tmp_path / "a.pth"), CPU, network="resnet18")
    with pytest.raises(ValueError, match="fit none of resnet18"):
        open_model(str(tmp_path / "a.pth"), CPU)


class Trap:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, ())  # pyright: ignore[reportReturnType]


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": Trap()}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="holds more than weights"):
        open_model(str(tmp_path / "a.pth"), CPU)


@pytest.mark.parametrize(
    ("place", "words"),
    [("nowhere/weights.pth", "nowhere/weights.pth"), ("resnet51", "did you mean")],
)
def test_what_is_not_there_is_one_line(place: str, words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_model(place, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34", "resnet101"])
def test_a_deeper_network_is_not_taken_for_a_shallower_one(name: str) -> None:
    """It has all the weights of ResNet-18 or -50, of the same shapes, and more."""
    state = timm.create_model(name).state_dict()
    assert with_weights(state).name == name
    with pytest.raises(ValueError, match="not one of its own"):
        with_weights(state, {"resnet34": "resnet18", "resnet101": "resnet50"}[name])


def test_old_files_without_counters_are_read() -> None:
    state = timm.create_model("resnet18").state_dict()
    old = {key: v for key, v in state.items() if not key.endswith("num_batches_tracked")}
    assert with_weights(old).name == "resnet18"


def test_a_vision_transformer_is_made_for_the_size_that_is_asked_for(tmp_path: Path) -> None:
    network = timm.create_model("test_vit", num_classes=0, img_size=64)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), CPU, network="test_vit", size=64)
    with torch.no_grad():
        expected = network.eval()(images(64))
        torch.testing.assert_close(model.network(images(64)), expected, rtol=1e-5, atol=1e-5)


def test_the_size_of_a_run_is_its_own(run: Path) -> None:
    with pytest.raises(ValueError, match="--network and --size"):
        open_model(str(run), CPU, size=64)


def test_weights_of_others_see_antialiased_crops(tmp_path: Path) -> None:
    """As torchvision and timm train and test them."""
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), torch.device("cpu"))
    assert model.antialias
    assert model.crop().protocol()["resize"].endswith(", antialiased")


@pytest.mark.slow
@pytest.mark.parametrize("antialias", [False, True])
def test_a_run_is_judged_with_the_antialiasing_that_it_was_trained_with(
    tmp_path: Path, antialias: bool
) -> None:
    pretrain(tiny(f"views.antialias={antialias}"), tmp_path, display=silent())
    for place in (tmp_path, tmp_path / "encoder.safetensors"):
        assert open_model(str(place), torch.device("cpu")).antialias is antialias


def test_a_method_that_a_program_made_is_not_made_by_the_settings(tmp_path: Path) -> None:
    """It may have other sharpness, or other heads; the encoder is there all the same."""

    def own(config: Config) -> Any:
        method: Any = build(config)
        method.projection.append(torch.nn.Identity())
        return method

    pretrain(tiny("method=c-simclr"), tmp_path / "a", display=silent(), method=own)
    model = open_model(str(tmp_path / "a"), CPU)
    assert model.method is None
    assert "Python" in model.why_no_method
    assert model.network(images(16)).shape == (2, 96)


def test_damaged_checkpoints_are_no_reason_to_refuse_an_encoder(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    model = open_model(str(tmp_path / "a"), CPU)
    assert model.method is None
    assert "damaged" in model.why_no_method
    whole = open_model(str(run), CPU)
    assert torch.equal(model.network(images(16)), whole.network(images(16)))
