"""The model inside a checkpoint of the official code: what it is, and its weights."""

from collections.abc import Mapping
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compressive.config import Network
from compressive.tensorflow_checkpoint import names
from compressive.tensorflow_checkpoint.object_graph import GRAPH, ObjectGraph
from compressive.tensorflow_checkpoint.tensor_bundle import TensorBundle

_ENCODER, _TARGET, _CLASSIFIER = "_resnet", "_target_resnet", "supervised_head"
_PROJECTION, _PREDICTOR, _BACKWARD = "_projection_head", "_projector", "_target_projector"
_KNOWN = "ResNet-18, -34, -50, -101 and -152"
_STOCHASTIC_LAYERS = (0, 2)  # of C-BYOL's predictor; layer 1 is never built, layer 3 is l
_STEPS = ("global_step", "finetune_global_step")


class SubNetwork(NamedTuple):
    """A network of the model: its attribute, and names of weights in our methods -> paths."""

    attribute: str
    paths: Mapping[str, str]


class OfficialModel:
    """A checkpoint of the official code, identified by the variables in it."""

    def __init__(self, prefix: Path) -> None:
        self.prefix: Path = prefix
        self._bundle: TensorBundle = TensorBundle(prefix)
        if GRAPH not in self._bundle.entries:
            hint = "the official checkpoints are of TensorFlow 2"
            raise ValueError(f"{prefix} has no object graph: it is of TensorFlow 1; {hint}")
        content = self._bundle.text(GRAPH)
        try:
            self._graph = ObjectGraph(content)
        except ValueError as error:
            raise ValueError(f"{prefix} is damaged: {error}; download or copy it again") from None
        model = self._graph.parent_of(_ENCODER)
        if model is None:
            there = ", ".join(self._graph.attributes(0)[:6])
            hint = "only models of the paper's official code can be converted"
            raise ValueError(f"{prefix} has no {_ENCODER!r} among its objects ({there}); {hint}")
        self._model = model

    # --- what it is ---------------------------------------------------------------------------

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Return the methods that have these variables: C-SimCLR has those of SimCLR."""
        if not self._has(_TARGET):
            return "simclr", "c-simclr"
        is_compressed = self._is_stochastic and self._has(_BACKWARD)
        return ("c-byol" if is_compressed else "byol",)

    @cached_property
    def network(self) -> Network:
        """Return the settings of the network; raise ValueError if this package has none such."""
        name = names.BLOCKS.get((self._blocks, self._is_bottleneck))
        if name is None:
            blocks = f"{list(self._blocks)} {'bottleneck' if self._is_bottleneck else 'basic'}"
            raise ValueError(f"{self.prefix}: a ResNet of {blocks} blocks is not one of {_KNOWN}")
        shape = self._shape(_ENCODER, names.STEM_KERNEL)
        channels = shape[-1] if shape else 0
        is_known = shape[:-1] in ((7, 7, 3), (3, 3, 3)) and channels > 0 and channels % 64 == 0
        if not is_known:
            allowed = "[7, 7, 3, 64 * width] or [3, 3, 3, 64 * width]"
            raise ValueError(f"{self.prefix}: the stem must be {allowed}, got {list(shape)}")
        sizes = self.projection_sizes
        return Network(
            name=name,
            width=channels // 64,
            stem="imagenet" if shape[0] == 7 else "cifar",
            variant="official",
            head_layers=max(len(sizes) - 1, 1),
            hidden_dim=sizes[1] if len(sizes) > 2 else Network().hidden_dim,
            projection_dim=sizes[-1] if sizes else Network().projection_dim,
        )

    @cached_property
    def projection_sizes(self) -> tuple[int, ...]:
        """Return the dimensions of the projection from its input to its output."""
        layers = self._linear_layers(_PROJECTION)
        shapes = [self._shape(_PROJECTION, f"linear_layers/{i}/dense/kernel") for i in layers]
        if not shapes or any(len(shape) != 2 for shape in shapes):
            return ()
        return shapes[0][0], *(shape[1] for shape in shapes)

    @cached_property
    def classifier_shape(self) -> tuple[int, int] | None:
        """Return inputs and classes of the linear classifier, if there is one."""
        shape = self._shape(_CLASSIFIER, names.CLASSIFIER_PATHS["classifier.weight"])
        return (shape[0], shape[1]) if len(shape) == 2 else None

    @cached_property
    def step(self) -> int | None:
        """Return the number of training steps, if the checkpoint has it."""
        for name in _STEPS:
            if (key := self._graph.key(0, name)) in self._bundle.entries:
                value = self._bundle.tensor(key)
                is_number = value.numel() == 1 and not value.is_floating_point()
                return int(value) if is_number else None
        return None

    @cached_property
    def heads(self) -> tuple[SubNetwork, ...]:
        """Return all known networks apart from the encoder."""
        predictor = self._mlp(_PREDICTOR, "predictor")
        if self._is_stochastic:
            paths = _with_prefix("predictor", names.mlp_paths(_STOCHASTIC_LAYERS))
            paths["decoder.weight"] = "linear_layers/3/dense/kernel"
            predictor = SubNetwork(_PREDICTOR, paths)
        found = (
            self._mlp(_PROJECTION, "projection"),
            predictor,
            self._mlp(_BACKWARD, "backward_encoder"),
            SubNetwork(_TARGET, _with_prefix("target.network.0", self._backbone_paths)),
            self._mlp("_target_head", "target.network.1"),
            SubNetwork(_CLASSIFIER, names.CLASSIFIER_PATHS),
        )
        return tuple(part for part in found if self._has(part.attribute))

    @cached_property
    def unknown_heads(self) -> tuple[str, ...]:
        """Return attributes of the model with variables that no known network has."""
        known = {_ENCODER, *(part.attribute for part in self.heads)}
        used = {key for name in known for key in self._keys_below(name)}
        there = self._graph.attributes(self._model)
        return tuple(name for name in there if self._keys_below(name).keys() - used)

    # --- weights ------------------------------------------------------------------------------

    def check_shapes(self, expected: Mapping[str, torch.Size]) -> None:
        """Raise ValueError if a shape differs from that of a method's weight of the same name."""
        encoder = SubNetwork(_ENCODER, _with_prefix("encoder", self._backbone_paths))
        for part in (encoder, *self.heads):
            for name, key in self._keys(part).items():
                got = self._bundle.shape(key)
                wanted = _official_shape(expected[name]) if name in expected else got
                if got != wanted:
                    path = f"{part.attribute}/{part.paths[name]}"
                    rule = f"must have the shape {list(wanted)}, got {list(got)}"
                    raise ValueError(f"{self.prefix}: {path} {rule}")

    def encoder_weights(self) -> dict[str, Tensor]:
        """Read the backbone's weights, by timm's names."""
        return self._weights(SubNetwork(_ENCODER, self._backbone_paths))

    def head_weights(self) -> dict[str, Tensor]:
        """Read all other weights, by their names in the methods of this package."""
        if self.unknown_heads:
            what = f"the part {self.unknown_heads[0]!r} is unknown"
            raise ValueError(f"{self.prefix}: {what}; leave out --heads to convert the encoder")
        found: dict[str, Tensor] = {}
        for part in self.heads:
            found |= self._weights(part)
        return found

    def _weights(self, part: SubNetwork) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, key in self._keys(part).items():
            value, path = self._bundle.tensor(key).float(), f"{part.attribute}/{part.paths[name]}"
            if not value.isfinite().all():
                raise ValueError(f"{self.prefix}: {path} has values that are not finite")
            if name.endswith("running_var"):
                if (value < 0).any():
                    raise ValueError(f"{self.prefix}: {path} has negative values")
                found[name.replace("running_var", "num_batches_tracked")] = torch.tensor(0)
            if value.ndim == 4:  # height, width, in, out
                value = value.permute(3, 2, 0, 1)
            found[name] = (value.T if value.ndim == 2 else value).contiguous()
        return found

    def _keys(self, part: SubNetwork) -> dict[str, str]:
        """Return names here -> names in the checkpoint; raise ValueError unless all fit."""
        node = self._graph.find(self._model, part.attribute)
        assert node is not None
        keys = {name: self._graph.key(node, path) for name, path in part.paths.items()}
        absent = [part.paths[name] for name, key in keys.items() if key not in self._bundle.entries]
        if absent:
            what = f"{len(absent)} variables of {part.attribute}, such as {absent[0]}"
            raise ValueError(f"{self.prefix} lacks {what}")
        known, there = set(keys.values()), self._keys_below(part.attribute)
        if left := {path for key, path in there.items() if key not in known}:
            what = f"{len(left)} unknown variables in {part.attribute}, such as {min(left)}"
            raise ValueError(f"{self.prefix} has {what}; only {_KNOWN} are supported")
        return keys

    # --- the graph ----------------------------------------------------------------------------

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """Number of blocks in each group."""
        lengths = (self._length(f"{_ENCODER}/{names.blocks_path(group)}") for group in count())
        return tuple(takewhile(bool, lengths))

    @cached_property
    def _is_bottleneck(self) -> bool:
        path = f"{_ENCODER}/{names.blocks_path(0)}/0/{names.BOTTLENECK_LAYERS}"
        return self._graph.find(self._model, path) is not None

    @cached_property
    def _backbone_paths(self) -> dict[str, str]:
        return names.backbone_paths(self._blocks, bottleneck=self._is_bottleneck)

    @cached_property
    def _is_stochastic(self) -> bool:
        return bool(self._graph.key(self._model, f"{_PREDICTOR}/linear_layers/3/dense/kernel"))

    def _has(self, attribute: str) -> bool:
        return bool(self._keys_below(attribute))

    def _keys_below(self, attribute: str) -> dict[str, str]:
        node = self._graph.find(self._model, attribute)
        return {} if node is None else self._graph.keys(node)

    def _length(self, path: str) -> int:
        """Return the length of a list of objects."""
        node = self._graph.find(self._model, path)
        if node is None:
            return 0
        return next(i for i in count() if self._graph.find(node, str(i)) is None)

    def _linear_layers(self, attribute: str) -> list[int]:
        """Return positions of linear layers that have been built."""
        layers = f"{attribute}/linear_layers"
        positions = range(self._length(layers))
        return [i for i in positions if self._graph.key(self._model, f"{layers}/{i}/dense/kernel")]

    def _mlp(self, attribute: str, name: str) -> SubNetwork:
        return SubNetwork(
            attribute, _with_prefix(name, names.mlp_paths(self._linear_layers(attribute)))
        )

    def _shape(self, attribute: str, path: str) -> tuple[int, ...]:
        key = self._graph.key(self._model, f"{attribute}/{path}")
        return self._bundle.shape(key) if key in self._bundle.entries else ()


def _with_prefix(prefix: str, paths: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": path for name, path in paths.items()}


def _official_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return TensorFlow's shape of a kernel or matrix."""
    if len(shape) == 4:
        out, into, height, width = shape
        return height, width, into, out
    return tuple(reversed(shape))
