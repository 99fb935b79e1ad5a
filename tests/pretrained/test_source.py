"""Weights of every source load with the right network, and bad files are refused in one line."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import save_file
from tiny import silent, tiny
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from compressive import encoder
from compressive.classifier import Classifier, save_classifier
from compressive.config import Network
from compressive.pretrained import timm_weights
from compressive.pretrained.source import resolve
from compressive.pretrained.torchvision_names import torchvision_preprocessing
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

State = dict[str, Tensor]
BUNDLED = "cifar10-byol-r18"


def prefixed(prefix: str, state: State, shift: float = 0.0) -> State:
    """Return the weights under other names; `shift` makes those of a target different."""
    return {f"{prefix}{name}": value + shift for name, value in state.items()}


def zeros(name: str, **options: Any) -> State:
    """Return weights of a network by name and shape, without drawing them."""
    with torch.device("meta"):
        network = timm.create_model(name, num_classes=0, **options)
    return {key: torch.zeros(value.shape) for key, value in network.state_dict().items()}


def save(path: Path, content: Any) -> str:
    torch.save(content, path)
    return str(path)


def refused(place: str | Path, **options: Any) -> str:
    """Return the error of weights; it has one line."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        resolve(place, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def resnet() -> State:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).state_dict()


@pytest.fixture(scope="module")
def vit() -> State:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64).state_dict()


# State dicts of training scripts


def test_torchvision_weights_are_recognized(resnet: State, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(resnet, path)
    found = resolve(path)
    assert found.network == Network(name="resnet18")
    assert (found.size, found.crop) == (224, (0.875, "bilinear", False))  # torchvision's
    reference = torchvision.models.resnet18(weights=None).eval()
    reference.load_state_dict(resnet)
    reference.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours, theirs = found.backbone.eval()(images), reference(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
    )


def torchvision_convnext() -> nn.Module:
    network = torchvision.models.convnext_tiny()
    for name, value in network.named_parameters():
        if name.endswith("layer_scale"):  # 1e-6 at first, which would hide errors in blocks
            nn.init.uniform_(value, 0.5, 1.5)
    return network


@pytest.mark.parametrize(
    ("build", "is_old", "name", "size", "crop"),
    [
        (torchvision_vit, False, "vit_tiny_patch16_224", 32, (0.875, "bilinear", False)),
        (torchvision_vit, True, "vit_tiny_patch16_224", 32, (0.875, "bilinear", False)),
        (torchvision_convnext, False, "convnext_tiny", 224, (224 / 236, "bilinear", False)),
    ],
)
def test_torchvisions_vits_and_convnexts_have_their_features(
    build: Callable[[], nn.Module], is_old: bool, name: str, size: int, crop: object, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    reference = build().eval()
    state = dict(reference.state_dict())
    if is_old:  # names before torchvision 0.15
        old = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}
        pattern = re.compile("|".join(map(re.escape, old)))
        state = {pattern.sub(lambda m: old[m[0]], key): value for key, value in state.items()}
    found = resolve(save(tmp_path / "a.pth", state))
    assert (found.network.name, found.size, found.crop) == (name, size, crop)
    images = torch.randn(2, 3, 32, 32)
    if isinstance(reference, torchvision.models.ConvNeXt):
        reference.classifier[2] = nn.Identity()
    else:
        reference.heads = nn.Identity()
    with torch.no_grad():
        ours, theirs = found.backbone.eval()(images), reference(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32, another order


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_large_patch16_224", "convnext_base"])
def test_torchvisions_crops_have_its_size(name: str) -> None:
    own = {"vit_base_patch16_224": "vit_b_16", "vit_large_patch16_224": "vit_l_16"}.get(name, name)
    theirs = next(iter(torchvision.models.get_model_weights(own))).transforms()
    known = torchvision_preprocessing(name)
    image = torch.randint(256, (3, 260, 300), dtype=torch.uint8)
    picture = to_pil_image(image)
    expected = theirs(picture) * torch.tensor(known.std)[:, None, None]
    expected += torch.tensor(known.mean)[:, None, None]
    ours = known.crop(image[None], known.size)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


HEADS = {"fc.0.weight": torch.zeros(2), "fc.2.bias": torch.zeros(2)}
LAYOUTS = {
    "MoCo v2": lambda s: {
        "arch": "resnet18",
        "state_dict": prefixed("module.encoder_k.", s, 1.0)
        | prefixed("module.encoder_q.", s | HEADS)
        | {"module.queue": torch.zeros(2, 3), "module.queue_ptr": torch.zeros(1)},
    },
    "MoCo v3": lambda s: {
        "state_dict": prefixed("module.momentum_encoder.", s, 1.0)
        | prefixed("module.base_encoder.", s | HEADS)
        | {"module.predictor.0.weight": torch.zeros(2)}
    },
    "SimSiam": lambda s: {
        "state_dict": prefixed("module.encoder.", s | HEADS)
        | {"module.predictor.3.bias": torch.zeros(2)}
    },
    "solo-learn": lambda s: {
        "state_dict": prefixed("backbone.", s)
        | prefixed("momentum_backbone.", s, 1.0)
        | {"projector.0.weight": torch.zeros(2), "classifier.weight": torch.zeros(2)}
    },
    "BYOL": lambda s: (
        prefixed("online_network.", s)
        | prefixed("target_network.", s, 1.0)
        | {"online_network.projection.net.0.weight": torch.zeros(2)}
    ),
    "DINO": lambda s: {
        "student": prefixed("module.backbone.", s, 1.0) | {"module.head.mlp.0.bias": torch.ones(1)},
        "teacher": prefixed("backbone.", s) | {"head.last_layer.weight_g": torch.ones(1)},
        "args": argparse.Namespace(arch="resnet18"),
        "epoch": 3,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backbone_is_found_among_heads_and_targets(
    layout: str, resnet: State, tmp_path: Path
) -> None:
    found = resolve(save(tmp_path / "a.pth.tar", LAYOUTS[layout](resnet)))
    assert found.network.name == "resnet18"
    state = found.backbone.state_dict()
    assert all(torch.equal(value, resnet[name]) for name, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Network(name="resnet18", stem="cifar"),
        Network(name="resnet18", stem="cifar", variant="official"),
        Network(name="resnet18", width=2),
    ],
    ids=["stem", "variant", "width"],
)
def test_width_stem_and_variant_of_a_resnet_are_inferred(settings: Network, tmp_path: Path) -> None:
    from compressive.networks import build

    state = build(settings, 32).state_dict()
    found = resolve(save(tmp_path / "a.pt", state))
    assert found.network == settings
    assert found.size == (32 if settings.stem == "cifar" else 224)


def test_vit_of_dino_gets_its_size_and_normalization(vit: State, tmp_path: Path) -> None:
    place = save(tmp_path / "a.pth", {"teacher": prefixed("backbone.", vit)})
    found = resolve(place)
    assert (found.network.name, found.size) == ("vit_tiny_patch16_224", 64)
    assert found.mean == (0.485, 0.456, 0.406)  # not timm's default for this ViT, 0.5
    reference = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64).eval()
    reference.load_state_dict(vit)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(found.backbone.eval()(images), reference(images))
    larger = resolve(place, size=96)
    assert larger.backbone(torch.randn(1, 3, 96, 96)).shape == (1, 192)


@pytest.mark.slow
@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_with_and_without_registers_is_recognized(registers: int, tmp_path: Path) -> None:
    name = f"vit_small_patch14{'_reg4' * (registers > 0)}_dinov2"
    state = zeros(name, img_size=28)
    if registers:  # DINOv2's own names: its position embeddings include the class token
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat([torch.ones(1, 1, 384), state["pos_embed"]], 1)
    state["mask_token"] = torch.zeros(1, 384)
    found = resolve(save(tmp_path / "a.pth", state))
    assert (found.network.name, found.size) == (name, 28)
    assert found.crop is not None
    assert found.crop.share == 1.0  # as timm's tag lvd142m says
    if registers:
        assert bool((found.backbone.state_dict()["cls_token"] == 1).all())


def test_convnext_in_facebooks_names_is_recognized(tmp_path: Path) -> None:
    state = {}
    for name, value in zeros("convnext_atto").items():
        name = name.replace("stem.", "downsample_layers.0.").replace(".blocks.", ".")
        name = name.replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv")
        for stage in (1, 2, 3):
            old, new = f"stages.{stage}.downsample.", f"downsample_layers.{stage}."
            name = name.replace(old, new)
        if "pwconv" in name and value.ndim == 4:
            value = value.flatten(1)
        state[name.replace("head.norm", "norm")] = value
    found = resolve(save(tmp_path / "a.pth", {"model": state | {"head.weight": torch.zeros(2)}}))
    assert found.network.name == "convnext_atto"


def test_other_networks_load_by_name(tmp_path: Path) -> None:
    state = timm.create_model("test_vit", num_classes=7).state_dict()
    place = save(tmp_path / "a.pth", prefixed("module.backbone.", state))
    assert "--network" in refused(place)
    assert resolve(place, network="test_vit").network.name == "test_vit"


def test_tag_of_the_named_network_chooses_the_preprocessing(vit: State, tmp_path: Path) -> None:
    place = save(tmp_path / "a.pth", vit)
    tagged = "vit_tiny_patch16_224.augreg_in21k"
    assert resolve(place, network=tagged).mean == (0.5, 0.5, 0.5)


# timm, the hub and Hugging Face folders


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache of the hub without network access."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(timm_weights, "_is_online", lambda: False)
    return tmp_path / "hub"


def cached(hub: Path, repository: str) -> Path:
    """Return the folder of a repository as the hub stores it."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    return folder / "snapshots" / ("a" * 40)


def test_timm_name_with_tag_loads_from_the_cache(hub: Path) -> None:
    network: Any = timm.create_model("test_resnet")
    save_file(network.state_dict(), cached(hub, "timm/test_resnet.r160_in1k") / "model.safetensors")
    found = resolve("test_resnet.r160_in1k")
    assert found.network == Network(name="test_resnet")
    assert found.size == 160
    assert torch.equal(found.backbone.state_dict()["conv1.0.weight"], network.conv1[0].weight)


def test_unknown_tag_lists_the_known_ones(hub: Path) -> None:
    assert "r160_in1k" in refused("test_resnet.wrong")


def hugging_face(folder: Path, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=3, **arguments)
    timm.models.save_for_hf(network, str(folder), model_args=arguments)
    return network


def test_hub_id_and_local_folder_load_alike(hub: Path, tmp_path: Path) -> None:
    network = hugging_face(cached(hub, "a/b"), img_size=64)
    hugging_face(tmp_path / "folder", img_size=64)
    network.reset_classifier(0)  # pyright: ignore[reportCallIssue]
    images = torch.randn(2, 3, 64, 64)
    for place in ("hf-hub:a/b", str(tmp_path / "folder")):
        found = resolve(place)
        assert (found.network.name, found.size) == ("test_vit", 64)
        assert found.mean == (0.5, 0.5, 0.5)
        ours = found.backbone.eval()(images)
        torch.testing.assert_close(ours, network.eval()(images), rtol=1e-5, atol=1e-5)


def test_folders_that_are_not_timms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2", "architectures": []}))
    assert "transformers" in refused(tmp_path)
    hugging_face(tmp_path, global_pool="avg")
    assert "global_pool=avg" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(tmp_path)


@pytest.mark.slow
def test_run_and_bundled_encoder_load(tmp_path: Path) -> None:
    pretrain(tiny("views.mean=0.5,0.5,0.5"), tmp_path / "a", display=silent())
    for place in (tmp_path / "a", tmp_path / "a" / "encoder.safetensors"):
        found = resolve(place)
        assert (found.network.name, found.size) == ("test_resnet", 16)
        assert found.mean == (0.5, 0.5, 0.5)
        assert found.crop is None
    assert resolve(BUNDLED).network.stem == "cifar"


# Bad input


def test_partly_matching_weights_name_count_and_first(resnet: State, tmp_path: Path) -> None:
    missing = {n: v for n, v in resnet.items() if n not in ("layer4.1.bn1.bias", "bn1.bias")}
    message = refused(save(tmp_path / "a.pth", missing))
    assert "resnet18" in message
    assert "2 of 100" in message
    assert "bn1.bias" in message
    other = resnet | {"layer2.0.conv2.weight": torch.zeros(2, 3, 4, 5)}
    message = refused(save(tmp_path / "b.pth", other))
    assert "layer2.0.conv2.weight: 2x3x4x5 instead of 128x128x3x3" in message
    more = resnet | {"attention.weight": torch.zeros(2)}
    assert "attention.weight" in refused(save(tmp_path / "c.pth", more))
    outside = prefixed("backbone.", resnet) | {"gate.weight": torch.zeros(2)}
    assert "gate.weight" in refused(save(tmp_path / "d.pth", outside))


def test_wrong_network_is_refused(resnet: State, vit: State, tmp_path: Path) -> None:
    place = save(tmp_path / "a.pth", resnet)
    assert "resnet50" in refused(place, network="resnet50")
    assert "test_vit" in refused(place, network="test_vit")
    assert "resnet51" in refused(place, network="resnet51")
    assert "resnet18" in refused(BUNDLED, network="resnet50")


def test_old_files_without_counters_load(resnet: State, tmp_path: Path) -> None:
    old = {n: v for n, v in resnet.items() if not n.endswith("num_batches_tracked")}
    found = resolve(save(tmp_path / "a.pth", old)).backbone.state_dict()
    assert found["bn1.num_batches_tracked"] == 0


def test_small_vit_of_moco_v3_is_refused(tmp_path: Path) -> None:
    """It has 12 heads, which shapes do not tell; timm's has 6."""
    state = zeros("vit_small_patch16_224", img_size=32)
    place = save(tmp_path / "a.pth", prefixed("module.base_encoder.", state))
    assert "12 heads" in refused(place)


def test_weights_that_are_not_finite_are_refused(resnet: State, tmp_path: Path) -> None:
    bad = resnet | {"bn1.weight": torch.full((64,), float("nan"))}
    message = refused(save(tmp_path / "a.pth", bad))
    assert "NaN" in message
    assert "bn1.weight" in message


class Trap:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("suffix", [".pth", ".bin"])
def test_code_in_a_pickle_is_not_executed(suffix: str, tmp_path: Path) -> None:
    place = save(tmp_path / f"a{suffix}", {"state_dict": Trap(tmp_path / "trapped")})
    assert "open" in refused(place)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_and_empty_files_are_refused(suffix: str, tmp_path: Path) -> None:
    path, state = tmp_path / f"a{suffix}", {"conv1.weight": torch.zeros(64, 3, 7, 7)}
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    content = path.read_bytes()
    for length in (0, 5, len(content) // 2, len(content) - 3):
        path.write_bytes(content[:length])
        assert path.name in refused(path)


def test_classifier_is_not_an_encoder(tmp_path: Path) -> None:
    own = encoder.load(BUNDLED)
    path = tmp_path / "classifier.safetensors"
    head = nn.Linear(own.feature_dim, 2)
    save_classifier(path, Classifier(own, head, ("cat", "dog")))
    assert "classifier" in refused(path)


def test_missing_path_and_run_without_encoder_are_refused(tmp_path: Path) -> None:
    assert "nowhere/a.pth" in refused("nowhere/a.pth")
    (tmp_path / "config.json").write_text(json.dumps({"format_version": 2, "method": "simclr"}))
    assert "encoder" in refused(tmp_path)
