"""Save and load a fine-tuned classifier: an encoder and a linear layer over named classes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import validates_inputs
from compressive.device import check_device
from compressive.encoder import Encoder, check_metadata, describe, restore
from compressive.rundir.files import CLASSIFIER, ENCODER, local_path, write_bytes
from compressive.rundir.folder import check_run_id
from compressive.rundir.tensors_file import read_safetensors, reproducible_bytes

__all__ = ["Classifier", "load_classifier", "save_classifier"]

_LAYER = "classifier."  # prefix of the linear layer's weights in the file
_LOGITS_USAGE = "logits: <code>classifier(classifier.encoder.preprocess(images))</code>"


class Classifier(nn.Module):
    """An encoder with a linear layer that returns one logit per class.

    `classifier(classifier.encoder.preprocess(images))` returns the logits in the order of
    `classes`.
    """

    def __init__(self, encoder: Encoder, head: nn.Linear, classes: tuple[str, ...]) -> None:
        super().__init__()
        shape = (len(classes), encoder.feature_dim)
        if tuple(head.weight.shape) != shape or head.bias is None:
            got = f"{tuple(head.weight.shape)}, bias: {head.bias is not None}"
            raise ValueError(f"head must be a linear layer of shape {shape} with bias, got {got}")
        self.encoder: Encoder = encoder
        self.head: nn.Linear = head
        self.classes: tuple[str, ...] = classes

    def __repr__(self) -> str:
        inside = repr(self.encoder).removeprefix("<").removesuffix(">")
        return f"<Classifier of {len(self.classes)} classes: {inside}>"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code><p>{_LOGITS_USAGE}</p>"

    @validates_inputs
    def forward(self, images: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch classes"]:
        """Return the logits of preprocessed images."""
        return self.head(self.encoder(images))


def save_classifier(path: Path, classifier: Classifier, *, run_id: str = "") -> Path:
    """Write classifier.safetensors: backbone by timm's names, linear layer, metadata, classes."""
    weights = dict(classifier.encoder.network.state_dict())
    weights |= {f"{_LAYER}{name}": value for name, value in classifier.head.state_dict().items()}
    metadata = describe(classifier.encoder) | {"classes": json.dumps(classifier.classes)}
    metadata |= {"run_id": run_id} if run_id else {}
    write_bytes(path, reproducible_bytes(weights, metadata))
    return path


def load_classifier(place: str | Path, device: str | torch.device = "cpu") -> Classifier:
    """Load a classifier, frozen and in evaluation mode.

    `place` is the folder of a fine-tuning run or its classifier.safetensors.
    """
    check_device(device)
    path = _find_classifier(place)
    metadata, weights = read_safetensors(path)
    if "classes" not in metadata:
        hint = "make one with `compressive finetune`"
        raise ValueError(f"{path} is no classifier: it names no classes; {hint}")
    check_run_id(place, path, check_metadata(path, metadata))
    classes, head = _read_classes(path, metadata), _read_head(path, weights)
    backbone = {name: w for name, w in weights.items() if not name.startswith(_LAYER)}
    encoder = restore(path, metadata, backbone)
    try:
        classifier = Classifier(encoder, head, classes)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return classifier.to(device).eval().requires_grad_(False)


def _find_classifier(place: str | Path) -> Path:
    path = local_path(place)
    if path.is_dir():
        if not (path / CLASSIFIER).is_file() and (path / ENCODER).is_file():
            hint = f"`compressive finetune {path} DATA` makes one"
            raise FileNotFoundError(f"{path} holds an encoder, but no {CLASSIFIER}; {hint}")
        path = path / CLASSIFIER
    if not path.is_file():
        hint = f"give the folder of a fine-tuning run, or its {CLASSIFIER}"
        raise FileNotFoundError(f"no classifier at {path}; {hint}")
    return path


def _read_classes(path: Path, metadata: Mapping[str, str]) -> tuple[str, ...]:
    names: list[str] = []
    with suppress(ValueError, TypeError, RecursionError):
        names = [name for name in json.loads(metadata["classes"]) if isinstance(name, str)]
        if json.dumps(names) != metadata["classes"]:
            names = []
    if len(set(names)) != len(names) or len(names) < 2:
        raise ValueError(f"{path} is damaged: `classes` must list 2 or more different names")
    return tuple(names)


def _read_head(path: Path, weights: Mapping[str, Tensor]) -> nn.Linear:
    weight, bias = (weights.get(f"{_LAYER}{name}") for name in ("weight", "bias"))
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ValueError(f"{path} is damaged: it has no linear layer {_LAYER}weight, {_LAYER}bias")
    if odd := [n for n, w in weights.items() if w.is_floating_point() and not w.isfinite().all()]:
        raise ValueError(f"{path} is damaged: {odd[0]} has values that are not finite")
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.load_state_dict({"weight": weight, "bias": bias})
    return head
