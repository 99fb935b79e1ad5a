"""Convert a TensorFlow checkpoint of the official code to an encoder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from compressive import methods
from compressive.config import Config, Network, Target, Views
from compressive.data.loaders import most_needed
from compressive.encoder import Encoder, describe
from compressive.networks import build
from compressive.platforms.shapes_only import shapes_only
from compressive.rundir.files import local_path, write_files
from compressive.rundir.fingerprint import weights_fingerprint
from compressive.rundir.tensors_file import reproducible_bytes
from compressive.tensorflow_checkpoint.find import find_prefix
from compressive.tensorflow_checkpoint.official_model import OfficialModel

_SIZES = {"imagenet": 224, "cifar": 32}  # input pixels, by stem
_PARTS = {  # first part of the names of weights -> what to call it
    "projection": "projection",
    "predictor": "predictor",
    "decoder": "linear decoder l",
    "backward_encoder": "backward encoder m",
    "target": "target network",
    "classifier": "classifier",
}


class Converted(NamedTuple):
    """What a checkpoint contained, and the files that were written."""

    path: Path
    heads: Path | None
    checkpoint: Path  # the prefix of its file names
    methods: tuple[str, ...]  # those that have these variables
    network: Network
    size: int  # input pixels
    step: int | None  # of training; None: not stored
    parts: tuple[str, ...]  # networks apart from the encoder
    classifier: tuple[int, int] | None  # inputs and classes of the linear classifier
    classifier_input: str  # "features", "projection", or ""
    ignored: tuple[str, ...]  # parts of the model that are unknown
    fingerprint: str  # hash of the encoder's weights


def convert(path: str | Path, out: str | Path, *, heads: str | Path | None = None) -> Converted:
    """Write the encoder of a TensorFlow checkpoint of the paper's code; TensorFlow is not needed.

    `path` is a folder, an .index file, or the prefix of a checkpoint's file names. `out` is
    the file to write; `compressive.load` and `evaluate` read it. `heads` is a file for all other
    weights, by their names in `compressive.methods`, and for the linear classifier.
    """
    target, more = _output(out, "out"), None if heads is None else _output(heads, "heads")
    if target == more:
        raise ValueError(f"out and heads must be different files, got {target} twice")
    model = OfficialModel(find_prefix(path))
    network = model.network
    size = _SIZES[network.stem]
    model.check_shapes(method_shapes(model.methods[0], network, size))
    weights = model.encoder_weights()
    about = {"source": model.prefix.name, "methods": json.dumps(model.methods)}
    about |= {} if model.step is None else {"step": str(model.step)}
    with shapes_only():
        encoder = Encoder(build(network, size), network, size, most_needed(size))
    contents = {target: [reproducible_bytes(weights, describe(encoder) | about)]}
    if more is not None:
        stated = {"format": "pt", "network": json.dumps(asdict(network)), **about}
        stated["classifier_input"] = _classifier_input(model, encoder.feature_dim)
        contents[more] = [reproducible_bytes(model.head_weights(), stated)]
    write_files(contents)
    names = dict.fromkeys(name.partition(".")[0] for part in model.heads for name in part.paths)
    return Converted(
        path=target,
        heads=more,
        checkpoint=model.prefix,
        methods=model.methods,
        network=network,
        size=size,
        step=model.step,
        parts=tuple(_PARTS[name] for name in names),
        classifier=model.classifier_shape,
        classifier_input=_classifier_input(model, encoder.feature_dim),
        ignored=model.unknown_heads,
        fingerprint=weights_fingerprint((name, w.numpy()) for name, w in weights.items()),
    )


def _output(path: str | Path, option: str) -> Path:
    found = local_path(path)
    if found.suffix != ".safetensors" or found.is_dir():
        raise ValueError(f"{option} must be a file with the ending .safetensors, got {found}")
    return found


def method_shapes(method: str, network: Network, size: int) -> dict[str, torch.Size]:
    """Return names and shapes of the weights of a method."""
    copied = Target(independent=False)  # faster than building a second backbone
    config = Config(method=method, network=network, views=Views(size=size), target=copied)
    with shapes_only():
        built = methods.build(config)
    return {name: value.shape for name, value in built.state_dict().items()}


def _classifier_input(model: OfficialModel, feature_dim: int) -> str:
    """Return what the linear classifier takes: the official default is the projection."""
    if model.classifier_shape is None:
        return ""
    inputs = {feature_dim: "features", model.network.projection_dim: "projection"}
    return inputs.get(model.classifier_shape[0], "")
