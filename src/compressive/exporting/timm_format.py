"""Export to timm: a folder that `timm.create_model("local-dir:...")` loads."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from compressive.augment.ops import central_share
from compressive.augment.published_crop import PublishedCrop
from compressive.config import RESNETS
from compressive.encoder import Encoder
from compressive.exporting.formats import CannotRepresent
from compressive.exporting.model import ExportModel, stored_weights
from compressive.networks import fits
from compressive.platforms.shapes_only import shapes_only

WEIGHTS_FILE, TIMM_CONFIG = "model.safetensors", "config.json"
_BOTTLENECK = ("resnet50", "resnet101", "resnet152")
# Names in timm's ResNet -> names in its ResNetV2.
_RENAMES = (
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.norm."),
    (r"^layer(\d)\.(\d+)\.", lambda found: f"stages.{int(found[1]) - 1}.blocks.{found[2]}."),
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.downsample\.0\.", ".downsample.conv."),
    (r"\.downsample\.1\.", ".downsample.norm."),
)


class TimmModel(NamedTuple):
    """A timm network that computes what the encoder computes."""

    name: str
    args: dict[str, Any]  # of timm.create_model
    weights: dict[str, Tensor]


def find_timm_model(model: ExportModel, *, half: bool = False, to: str = "timm") -> TimmModel:
    """Return timm's name, arguments and weights; raise CannotRepresent if timm has no such network.

    timm's ResNet has neither TensorFlow's max-pool nor a wider stem. Its ResNetV2 without
    pre-activation has both and is otherwise a ResNet-50, -101 or -152.
    """
    settings, weights = model.encoder.settings, model.weights(half=half)
    name, args = settings.name, _size_argument(model)
    if name in RESNETS:
        if settings.stem == "cifar":
            raise CannotRepresent(to, "timm has no ResNet with the 3x3 stem of network.stem=cifar")
        is_official = settings.variant == "official"
        if is_official or settings.width > 1:
            if name not in _BOTTLENECK:
                what = "network.variant=official" if is_official else f"width={settings.width}"
                raise CannotRepresent(to, f"timm has no {name} with {what}")
            name = name.replace("resnet", "resnetv2_")
            args = {"preact": False, "width_factor": settings.width}
            args |= {"stem_type": "same"} if is_official else {}
            weights = {_renamed(key): value for key, value in weights.items()}
    with shapes_only():
        planned: Any = timm.create_model(name, num_classes=len(model.classes), **args)
    if model.head is not None:
        weights |= _classifier_weights(model, planned, to, half)
    if not fits(planned, weights):
        raise CannotRepresent(to, f"timm's {name} has other weights")
    return TimmModel(name, args, weights)


def _size_argument(model: ExportModel) -> dict[str, Any]:
    with shapes_only():
        known: Any = timm.create_model(model.encoder.settings.name, num_classes=0)
    fixed = known.pretrained_cfg.get("fixed_input_size")
    return {"img_size": model.encoder.size} if fixed else {}


def _renamed(key: str) -> str:
    for pattern, new in _RENAMES:
        key = re.sub(pattern, new, key)
    return key


def _classifier_weights(model: ExportModel, planned: Any, to: str, half: bool) -> dict[str, Tensor]:
    """Return the classifier's weights by the names of timm's network."""
    assert model.head is not None
    name, state = planned.pretrained_cfg.get("classifier"), planned.state_dict()
    if not isinstance(name, str) or f"{name}.bias" not in state:
        raise CannotRepresent(to, f"timm's {model.encoder.settings.name} has no single classifier")
    found = stored_weights(model.head, half=half)
    shape = state[f"{name}.weight"].shape  # ResNetV2 has a 1x1 convolution
    return {f"{name}.weight": found["weight"].reshape(shape), f"{name}.bias": found["bias"]}


def check(model: ExportModel) -> None:
    """Raise CannotRepresent if timm cannot build the network."""
    find_timm_model(model)


def write(model: ExportModel, path: Path, *, half: bool, with_preprocessing: bool) -> None:
    """Write config.json and model.safetensors into a new folder."""
    write_folder(model, path, find_timm_model(model, half=half))


def write_folder(model: ExportModel, path: Path, found: TimmModel) -> None:
    """Write the two files that timm reads."""
    path.mkdir(exist_ok=True)
    save_file(found.weights, path / WEIGHTS_FILE, {"format": "pt"})
    text = json.dumps(_timm_config(model, found), indent=2, ensure_ascii=False)
    (path / TIMM_CONFIG).write_text(text + "\n", "utf-8")


def _timm_config(model: ExportModel, found: TimmModel) -> dict[str, Any]:
    encoder, count = model.encoder, len(model.classes)
    with shapes_only():
        known: Any = timm.create_model(found.name, num_classes=count, **found.args)
    config = {"architecture": found.name, "num_classes": count, "num_features": known.num_features}
    config |= {"model_args": found.args} if found.args else {}
    config |= {"label_names": list(model.classes)} if model.classes else {}
    kept = ("fixed_input_size", "first_conv", "classifier")
    config["pretrained_cfg"] = {
        "tag": "compressive",
        "custom_load": False,
        "input_size": [3, encoder.size, encoder.size],
        **_crop_settings(encoder),
        "mean": list(encoder.mean),
        "std": list(encoder.std),
        "num_classes": count,
        **{name: known.pretrained_cfg[name] for name in kept if name in known.pretrained_cfg},
    }
    # transformers would otherwise compute in the type of the first weight.
    return config | {"dtype": "float32"}


def _crop_settings(encoder: Encoder) -> dict[str, Any]:
    """Return timm's settings of the crop; of third-party weights their own."""
    crop = encoder.crop or PublishedCrop(share=central_share(encoder.size))
    mode = "squash" if crop.squash else "center"
    return {"interpolation": crop.interpolation, "crop_pct": crop.share, "crop_mode": mode}


@torch.inference_mode()
def outputs(
    model: ExportModel, path: Path, batches: Sequence[Tensor]
) -> Mapping[str, list[Tensor]]:
    """Return what the exported network computes in timm."""
    network = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    return {"timm": [network(inputs) for inputs in batches]}


def usage(model: ExportModel, path: Path) -> str:
    """Return Python code that loads the export."""
    return f'timm.create_model("local-dir:{path}", pretrained=True)'
