"""The words a run is described in: frozen settings, JSON in and out, changes by dotted name.

Longer than 300 lines, so that every setting is in one file.
"""

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple


class MethodInfo(NamedTuple):
    """A method without torch: the file in `compressive.methods` that builds it, and its parts."""

    module: str
    compares_images: bool = False  # the loss of an image depends on the rest of its batch
    temperature: bool = False  # reads kappa_b without a bottleneck, as 1 / temperature
    same_view_negatives: bool = False
    ema_target: bool = False
    predictor: bool = False
    decoder: bool = False  # reads decoder.kappa_d


_SIMCLR = MethodInfo("contrastive", True, temperature=True, same_view_negatives=True)
_MOCO = MethodInfo("contrastive", True, temperature=True, ema_target=True, predictor=True)
_BYOL = MethodInfo("bootstrap", ema_target=True, predictor=True, decoder=True)
_SIMSIAM = MethodInfo("bootstrap", predictor=True, decoder=True)
METHODS: dict[str, MethodInfo] = {  # a name with c- is the compressed method
    "simclr": _SIMCLR,
    "c-simclr": _SIMCLR,
    "byol": _BYOL,
    "c-byol": _BYOL,
    "moco-v3": _MOCO,
    "c-moco-v3": _MOCO,
    "simsiam": _SIMSIAM,
    "c-simsiam": _SIMSIAM,
    "dcl": MethodInfo("dcl", True, temperature=True, same_view_negatives=True),
    "vicreg": MethodInfo("vicreg", True),
}
Stem = Literal["imagenet", "cifar"]
ResNetVariant = Literal["timm", "official"]
_RISE = "bottleneck.warmup_epochs"
_OF_COMPRESSION = (
    "bottleneck.kappa_e bottleneck.backward_view bottleneck.beta bottleneck.schedule "
    f"bottleneck.target_residual bottleneck.stochastic bottleneck.residual_estimator {_RISE}"
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and where they live while the network trains."""

    source: str = "builtin"  # a folder, parquet or tar files, torchvision:NAME, or builtin
    split: str = "train"  # the part of the source to train on
    max_side: int = 0  # larger images are shrunk to this longer side; 0: what views need
    cache_on_device: Literal["auto", "yes", "no"] = "auto"  # decode once, keep as uint8 on device
    workers: int = 0  # threads that decode otherwise; 0: one per core
    limit: int = 0  # use only so many images, drawn at random; 0: all

    def __post_init__(self) -> None:
        _at_least("data", self, max_side=0, workers=0, limit=0)


@dataclass(frozen=True, kw_only=True)
class Views:
    """How the two views of an image are made."""

    size: int = 224  # pixels of a view's side
    policy: Literal["byol", "simclr"] = "byol"  # t and t' of Table 6, or SimCLR's own for both
    crop_scale_min: float = 0.08  # smallest crop, as a share of the image
    strength: float = 1.0  # of the color distortion; only the simclr policy has a choice
    blur: bool = True  # off for views of about 32 pixels, as SimCLR's for CIFAR-10
    antialias: bool = False  # the official code has none

    def __post_init__(self) -> None:
        _at_least("views", self, size=8)
        _within("views", self, crop_scale_min=(0.0, 1.0, True))
        _within("views", self, strength=(0.0, 1.25, True))
        if self.policy == "byol" and self.strength != 1:
            raise ValueError("views.strength belongs to views.policy=simclr; the paper's is fixed")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The encoder and the heads behind it."""

    name: str = "resnet50"  # as timm calls it
    width: int = 1  # multiplies the channels of a ResNet, its stem too
    stem: Stem = "imagenet"  # cifar: 3x3, no pool, for about 32 pixels
    variant: ResNetVariant = "timm"  # the ResNet of timm, or of the paper's code
    zero_init_last: bool = True  # every block starts as its shortcut
    hidden_dim: int = 4096  # of the projection and the predictor
    projection_dim: int = 256  # dimension of the sphere
    head_layers: int = 2  # of the projection; MoCo v3 and SimSiam have 3
    head_last_norm: bool = False  # a batch-norm after the projection, as theirs

    def __post_init__(self) -> None:
        _at_least("network", self, width=1, hidden_dim=1, projection_dim=2, head_layers=1)


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """How much of a view may pass into its representation."""

    kappa_e: float = 1024.0  # sharpness of e(z|x): the width of the channel, higher keeps more
    kappa_b: float = 10.0  # sharpness of b(z|y): one over SimCLR's temperature
    backward_view: Literal["own", "other"] = "own"  # bootstrap: view of b(z|y); SimCLR's is other
    beta: float = 1.0  # price of a nat that b(z|y) cannot predict; 0 is free
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of beta; others rise from 0
    warmup_epochs: float = 0.0  # of the linear schedule
    target_residual: float | None = None  # reducible nats to steer beta toward; None: fixed beta
    stochastic: bool = True  # draw z; without, z is its mode, and the residual analytic
    residual_estimator: Literal["sampled", "analytic"] = "sampled"  # residual at z, or over all z

    def __post_init__(self) -> None:
        _within("bottleneck", self, kappa_e=(0.0, math.inf, True), kappa_b=(0.0, math.inf, True))
        _within("bottleneck", self, beta=(0.0, math.inf, False))
        _at_least("bottleneck", self, warmup_epochs=0)
        if self.target_residual is not None:
            _within("bottleneck", self, target_residual=(0.0, math.inf, True))
            if self.schedule != "constant":
                raise ValueError(
                    "bottleneck.target_residual steers beta: schedule must be constant"
                )


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """How the other view is told from z."""

    same_view_negatives: bool = True  # contrastive: K = 2B - 1 candidates in place of B
    kappa_d: float = 4.0  # bootstrap: concentration of d(y'|z); the loss's weight is half of it

    def __post_init__(self) -> None:
        _within("decoder", self, kappa_d=(0.0, math.inf, True))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The slow network that BYOL and MoCo v3 learn from."""

    ema_decay: float = 0.996  # how much it keeps of itself in a step, rising to 1 by a cosine
    independent: bool = True  # starts from its own random weights, as in the official code

    def __post_init__(self) -> None:
        _within("target", self, ema_decay=(0.0, 1.0, False))


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How the weights move."""

    name: Literal["lars", "sgd", "adamw"] = "lars"  # the optimizer; LARS is for large batches
    lr: float = 0.2  # peak, for 256 images; it grows with the batch
    momentum: float = 0.9  # of lars and sgd
    weight_decay: float = 1.5e-6  # not of biases and batch norms
    trust_coefficient: float = 0.001  # of lars
    warmup_epochs: float = 10.0  # the learning rate rises from 0; then it falls by a cosine

    def __post_init__(self) -> None:
        _within("optim", self, lr=(0.0, math.inf, True), trust_coefficient=(0.0, math.inf, True))
        _within("optim", self, momentum=(0.0, 0.9999, False))
        _within("optim", self, weight_decay=(0.0, math.inf, False))
        _at_least("optim", self, warmup_epochs=0)


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, in what portions, and on what."""

    epochs: int = 100  # how often each image is seen
    steps: int = 0  # 0: as many as the epochs make; else this many, whatever the epochs
    batch_size: int = 512  # images of all processes together
    grad_accum_steps: int = 1  # portions of a batch, one after the other; bootstrap methods only
    device: str = "auto"  # cuda where there is one
    precision: Literal["auto", "bf16", "float32"] = "auto"  # bf16 on a GPU; losses are float32
    compile: Literal["auto", "yes", "no"] = "auto"  # yes on a GPU
    activation_checkpointing: bool = False  # recompute activations backward: less memory, slower
    save_every: float = 10.0  # minutes between checkpoints
    log_every: int = 0  # steps between lines of metrics.jsonl; 0: about ten an epoch
    tensorboard: bool = True  # also write event files, for the tensorboard program

    def __post_init__(self) -> None:
        _at_least("train", self, epochs=1, steps=0, batch_size=2, grad_accum_steps=1, log_every=0)
        _within("train", self, save_every=(0.0, math.inf, True))
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"train.grad_accum_steps must divide train.batch_size, {self.batch_size}, got "
                f"{self.grad_accum_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is watched on the side where labels exist; the encoder never learns from them."""

    holdout: float = 0.1  # share of the labels kept away from probe and kNN, to test them on
    every_epochs: float = 0.0  # between evaluations; 0: twenty in a run
    neighbors: int = 20  # that vote in kNN
    bank: int = 20_000  # images that kNN looks among
    lr: float = 1e-3  # of the linear probe

    def __post_init__(self) -> None:
        _within("probe", self, holdout=(0.0, 0.9, False), lr=(0.0, math.inf, True))
        _at_least("probe", self, every_epochs=0, neighbors=1, bank=1)


@dataclass(frozen=True, kw_only=True)
class Health:
    """When a run is ill, and how often it may start again from its last good checkpoint."""

    max_restarts: int = 3  # returns to a good checkpoint; after that the run ends with an error
    spike_sigma: float = 3.0  # a loss so many deviations above its recent mean is a spike
    collapse_std: float = 0.1  # least spread of directions, as a share of what is uniform
    min_participation_ratio: float = 1.5  # fewest axes of projections; BYOL was at 3 and recovered

    def __post_init__(self) -> None:
        _at_least(
            "health", self, max_restarts=0, spike_sigma=0, collapse_std=0, min_participation_ratio=0
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    recipe: str = ""  # the recipe it began with
    method: str = "c-simclr"  # c- is the compressed one
    seed: int = 0  # of everything random: order, views, weights, z
    data: Data = field(default_factory=Data)
    views: Views = field(default_factory=Views)
    network: Network = field(default_factory=Network)
    bottleneck: Bottleneck = field(default_factory=Bottleneck)
    decoder: Decoder = field(default_factory=Decoder)
    target: Target = field(default_factory=Target)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    probe: Probe = field(default_factory=Probe)
    health: Health = field(default_factory=Health)

    def __post_init__(self) -> None:
        _require_types(self)
        _known("method", self.method, list(METHODS))
        _within("", self, seed=(0, 2**32 - 1, False))
        if self.bottleneck.target_residual is not None and not is_compressed(self):
            raise ValueError(
                f"bottleneck.target_residual steers what {self.method} does not have; "
                f"use method=c-{self.method}"
            )
        if self.train.grad_accum_steps > 1 and method_info(self).compares_images:
            raise ValueError(
                f"train.grad_accum_steps must be 1 for {self.method}, whose images are each "
                "other's "
                "negatives; lower train.batch_size, or use more processes"
            )


def method_info(config: Config) -> MethodInfo:
    """Return what the config's method is made of."""
    return METHODS[config.method]


def is_compressed(config: Config) -> bool:
    """Whether z is drawn and its residual information priced."""
    return config.method.startswith("c-")


def unused_settings(config: Config) -> dict[str, str]:
    """Settings that a run does not look at, the others being as they are, each with the reason."""
    method, info, optimizer = config.method, method_info(config), config.optim.name
    is_plain, is_bare = not is_compressed(config), config.network.head_layers == 1
    only = f"only c-{method} is" if f"c-{method}" in METHODS else f"{method} is not"
    # Of two reasons the first is reported.
    rules = (
        (is_plain, f"{only} compressed", _OF_COMPRESSION),
        (config.bottleneck.schedule != "linear", "bottleneck.schedule is not linear", _RISE),
        (is_plain and not info.temperature, f"{method} has no temperature", "bottleneck.kappa_b"),
        (
            not info.decoder,
            f"b(z|y) of {method} always takes the other view",
            "bottleneck.backward_view",
        ),
        (not info.decoder, f"{method} has no vMF decoder", "decoder.kappa_d"),
        (
            not info.same_view_negatives,
            f"{method} has no negatives of the same view",
            "decoder.same_view_negatives",
        ),
        (
            not info.ema_target,
            f"{method} has no EMA target",
            "target.ema_decay target.independent",
        ),
        (optimizer == "adamw", "optim.name is adamw", "optim.momentum"),
        (optimizer != "lars", f"optim.name is {optimizer}", "optim.trust_coefficient"),
        (config.views.policy == "byol", "views.policy is byol", "views.strength"),
        (not config.bottleneck.stochastic, "z is not drawn", "bottleneck.residual_estimator"),
        (config.train.steps > 0, "train.steps is given", "train.epochs"),
        (
            is_bare and not info.predictor,
            "network.head_layers is 1 and there is no predictor",
            "network.hidden_dim",
        ),
    )
    found: dict[str, str] = {}
    for holds, why, names in rules:
        if holds:
            found = dict.fromkeys(names.split(), why) | found
    return found


def override(config: Config, *changes: str) -> Config:
    """The config with settings changed, each given as "section.name=value".

    All of them are made before any is judged, so that two that belong together may come in any
    order.
    """
    settings = asdict(config)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"a change must be NAME=VALUE, such as optim.lr=0.3, got {change!r}")
        _set(settings, name.strip(), text.strip())
    return from_dict(settings)


def with_data(config: Config, data: str, *changes: str) -> Config:
    """The config for these images, with settings changed; not the images, nor the recipe's name."""
    found = override(config, f"data.source={data}", *changes)
    begun = override(config, f"data.source={data}")
    if (found.recipe, found.data.source) != (begun.recipe, begun.data.source):
        raise ValueError("give images as DATA and a recipe with --recipe, not as other settings")
    return found


def from_dict(settings: dict[str, Any]) -> Config:
    """A config of what `dataclasses.asdict` made of one; unknown names are errors."""
    return _build(Config, settings, "")


def flat(settings: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted name."""
    nested = asdict(settings) if isinstance(settings, Config) else settings
    result: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def total_steps(examples: int, epochs: int, batch: int) -> int:
    """Return the steps of a whole run: one more than its full batches, as in the official code."""
    for name, value, least in (
        ("batch", batch, 1),
        ("examples", examples, 1),
        ("epochs", epochs, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be {'positive' if least else '0 or more'}, got {value}")
    return examples * epochs // batch + 1


def _set(settings: dict[str, Any], name: str, text: str) -> None:
    """Put a value, given as text, where its dotted name says."""
    homes = [whole for whole in flat(Config()) if whole.endswith(f".{name}")]
    if homes and name not in settings:
        raise ValueError(f"no setting {name!r}; did you mean {' or '.join(homes)}?")
    kind: Any = Config
    *sections, last = name.split(".")
    for i, part in enumerate([*sections, last]):
        if not is_dataclass(kind):
            raise ValueError(f"{'.'.join(sections[:i])} is no section")
        hints = typing.get_type_hints(kind)
        _known("setting", part, list(hints), where=getattr(kind, "__name__", ""))
        kind = hints[part]
        settings = settings[part] if i < len(sections) else settings
    if is_dataclass(kind):
        raise ValueError(f"{name} is a section; it has {', '.join(f.name for f in fields(kind))}")
    settings[last] = _parse(text, kind, name)


def _parse(text: str, kind: Any, name: str) -> Any:
    """Text from a command line as a value of this type."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return _known(name, text, options)
    if isinstance(kind, types.UnionType):
        if text.lower() in ("none", "null"):
            return None
        kind = options[0]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {what}, got {text!r}") from None


def _build(kind: Any, settings: Any, where: str) -> Any:
    if not isinstance(settings, dict):
        raise ValueError(f"{where or 'a config'} must be an object of settings, got {settings!r}")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in settings.items():
        whole = f"{where}.{name}" if where else name
        _known("setting", name, list(hints), where=kind.__name__)
        hint = hints[name]
        values[name] = (
            _build(hint, value, whole) if is_dataclass(hint) else _typed(value, hint, whole)
        )
    return kind(**values)


def _require_types(settings: Any, where: str = "") -> None:
    """Refuse what Python lets pass where a config is made by hand: optim.name="adam", beta="1"."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not is_dataclass(hint):
            _typed(value, hint, f"{where}{name}")
        elif type(value) is hint:
            _require_types(value, f"{name}.")
        else:
            raise ValueError(f"{name} must be of type {name.title()}, got {value!r}")


def _typed(value: Any, kind: Any, name: str) -> Any:
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return _known(name, value, options)
    allowed = options or (kind,)
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # NumPy's, too
    if type(value) not in allowed:
        words = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise ValueError(f"{name} must be of type {words}, got {value!r}")
    return value


def _known(what: str, name: Any, options: Any, where: str = "") -> Any:
    if name in options:
        return name
    near = difflib.get_close_matches(str(name), list(map(str, options)), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    listed = ", ".join(map(str, options))
    if where == Config.__name__:
        raise ValueError(f"no {what} {name!r}; {hint}`compressive settings` lists all")
    if where:
        raise ValueError(f"no {what} {name!r} in {where}; {hint}there are {listed}")
    raise ValueError(f"{what} must be one of {listed}, got {name!r}")


def _at_least(section: str, settings: Any, **least: float) -> None:
    for name, low in least.items():
        value = getattr(settings, name)
        if not low <= value < math.inf:
            allowed = "finite" if value == math.inf else f"{low} or more"
            raise ValueError(f"{section}.{name} must be {allowed}, got {value}")


def _within(section: str, settings: Any, **bounds: tuple[float, float, bool]) -> None:
    """Low to high; the flag says that low itself is not allowed."""
    for name, (low, high, is_open) in bounds.items():
        value = getattr(settings, name)
        if not low <= value <= high or (is_open and value == low) or math.isinf(value):
            dot = f"{section}." if section else ""
            least = f"above {low:g}" if is_open else f"{low:g} or more"
            most = "" if math.isinf(high) else f" and at most {high:.10g}"
            allowed = "finite" if value == math.inf else f"{least}{most}"
            raise ValueError(f"{dot}{name} must be {allowed}, got {value}")
