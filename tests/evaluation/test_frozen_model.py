"""An encoder is the same whether opened from a run, a weights file or timm."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from compressive.evaluation.pretrained import read_weights, with_weights
from safetensors.torch import save_file
from tiny import silent, tiny
from torch import Tensor

from compressive import encoder
from compressive.augment.ops import MEAN, STD
from compressive.config import Config
from compressive.evaluation.frozen_model import open_model
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
def test_run_opens_with_encoder_and_heads(run: Path) -> None:
    model = open_model(str(run), CPU)
    assert model.method is not None
    assert model.config == tiny("method=c-byol")
    assert (model.size, model.feature_dim) == (16, 96)
    with torch.no_grad():
        h = model.network(images(16))
        torch.testing.assert_close(model.method.encoder(images(16)), h, rtol=0, atol=0)
    assert not any(p.requires_grad for p in model.method.parameters())


@pytest.mark.slow
def test_heads_are_withheld_until_they_match_the_encoder(run: Path, tmp_path: Path) -> None:
    """Simulate a run killed after it wrote the checkpoint and before it wrote the encoder."""
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


def test_encoder_file_gives_the_same_features(run: Path) -> None:
    model = open_model(str(run / "encoder.safetensors"), CPU)
    whole = open_model(str(run), CPU)
    with torch.no_grad():
        torch.testing.assert_close(
            model.network(images(16)), whole.network(images(16)), rtol=0, atol=0
        )
    assert model.method is None


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torchvision_weights_match_torchvision_features(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    reference = torchvision.models.resnet18(weights=None).eval()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(reference.state_dict(), path)
    else:
        save_file(reference.state_dict(), path)
    model = open_model(str(path), CPU)
    assert "resnet18" in model.name
    assert (model.size, model.mean, model.std) == (224, MEAN, STD)
    reference.fc = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        # Channels-last sums in another order.
        expected, found = reference(images(64)), model.network(images(64))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_nested_state_dict_with_module_prefix_is_loaded(tmp_path: Path) -> None:
    network = timm.create_model("resnet18", num_classes=5)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "a.pth")
    found = with_weights(read_weights(tmp_path / "a.pth"))
    assert found.name == "resnet18"
    assert torch.equal(found.network.state_dict()["conv1.weight"], state["module.conv1.weight"])


@pytest.mark.slow
def test_network_option_must_match_the_weights(tmp_path: Path) -> None:
    network = timm.create_model("test_vit", num_classes=0)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), CPU, network="test_vit")
    assert "test_vit" in model.name
    with pytest.raises(ValueError, match="resnet18: conv1"):
        open_model(str(tmp_path / "a.pth"), CPU, network="resnet18")
    with pytest.raises(ValueError, match="none of resnet18"):
        open_model(str(tmp_path / "a.pth"), CPU)


class Trap:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, ())  # pyright: ignore[reportReturnType]


def test_unsafe_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": Trap()}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a\.pth .*more than weights"):
        open_model(str(tmp_path / "a.pth"), CPU)


@pytest.mark.parametrize(
    ("place", "message"),
    [("nowhere/weights.pth", "nowhere/weights.pth"), ("resnet51", "did you mean")],
)
def test_unknown_model_is_refused(place: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_model(place, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34", "resnet101"])
def test_deeper_resnet_is_not_loaded_as_a_shallower_one(name: str) -> None:
    """ResNet-34 and -101 contain all weights of ResNet-18 and -50, with the same shapes."""
    state = timm.create_model(name).state_dict()
    assert with_weights(state).name == name
    with pytest.raises(ValueError, match=r"layer\d\.\d.* does not exist"):
        with_weights(state, {"resnet34": "resnet18", "resnet101": "resnet50"}[name])


def test_weights_without_batch_norm_counters_load() -> None:
    state = timm.create_model("resnet18").state_dict()
    old = {key: v for key, v in state.items() if not key.endswith("num_batches_tracked")}
    assert with_weights(old).name == "resnet18"


def test_vit_is_built_for_the_requested_size(tmp_path: Path) -> None:
    network = timm.create_model("test_vit", num_classes=0, img_size=64)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), CPU, network="test_vit", size=64)
    with torch.no_grad():
        expected = network.eval()(images(64))
        torch.testing.assert_close(model.network(images(64)), expected, rtol=1e-5, atol=1e-5)


def test_size_option_is_refused_for_a_run(run: Path) -> None:
    with pytest.raises(ValueError, match="--network and --size"):
        open_model(str(run), CPU, size=64)


def test_third_party_weights_use_antialiased_crops(tmp_path: Path) -> None:
    """Torchvision and timm train and test with antialiasing."""
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "a.pth")
    model = open_model(str(tmp_path / "a.pth"), torch.device("cpu"))
    assert model.antialias
    assert model.crop().protocol()["resize"].endswith(", antialiased")


@pytest.mark.slow
@pytest.mark.parametrize("antialias", [False, True])
def test_evaluation_uses_the_antialiasing_of_training(tmp_path: Path, antialias: bool) -> None:
    pretrain(tiny(f"views.antialias={antialias}"), tmp_path, display=silent())
    for place in (tmp_path, tmp_path / "encoder.safetensors"):
        assert open_model(str(place), torch.device("cpu")).antialias is antialias


def test_custom_method_is_not_rebuilt_from_the_config(tmp_path: Path) -> None:
    """A custom method may have another kappa or other heads. The encoder still opens."""

    def own(config: Config) -> Any:
        method: Any = build(config)
        method.projection.append(torch.nn.Identity())
        return method

    pretrain(tiny("method=c-simclr"), tmp_path / "a", display=silent(), method=own)
    model = open_model(str(tmp_path / "a"), CPU)
    assert model.method is None
    assert "Python" in model.why_no_method
    assert model.network(images(16)).shape == (2, 96)


def test_encoder_opens_despite_damaged_checkpoints(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    model = open_model(str(tmp_path / "a"), CPU)
    assert model.method is None
    assert "damaged" in model.why_no_method
    whole = open_model(str(run), CPU)
    assert torch.equal(model.network(images(16)), whole.network(images(16)))
