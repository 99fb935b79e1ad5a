"""The words a run is described in: frozen settings, JSON in and out, changes by dotted name.

Longer than 300 lines, so that every setting is in one file.
"""

import difflib
import math
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

Method = Literal[
    "simclr", "c-simclr", "byol", "c-byol", "moco-v3", "c-moco-v3", "simsiam", "c-simsiam"
]
METHODS: tuple[str, ...] = typing.get_args(Method)
_RISE = "bottleneck.warmup_epochs"
_OF_COMPRESSION = (
    "bottleneck.kappa_e bottleneck.b_sees bottleneck.beta bottleneck.schedule "
    f"bottleneck.target_rate bottleneck.sample bottleneck.rate {_RISE}"
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and where they live while the network trains."""

    source: str = "builtin"  # a folder, parquet or tar files, torchvision:NAME, or builtin
    split: str = "train"  # the part of the source to train on
    side: int = 0  # larger images are shrunk to this longer side; 0: what views need
    resident: Literal["auto", "yes", "no"] = "auto"  # decoded once, held on the device as uint8
    workers: int = 0  # threads that decode otherwise; 0: one per core
    limit: int = 0  # use only so many images, drawn at random; 0: all

    def __post_init__(self) -> None:
        _at_least("data", self, side=0, workers=0, limit=0)


@dataclass(frozen=True, kw_only=True)
class Views:
    """How the two views of an image are made."""

    size: int = 224  # pixels of a view's side
    set: Literal["paper", "simclr"] = "paper"  # t and t' of Table 6, or SimCLR's own for both
    crop_area_min: float = 0.08  # smallest crop, as a share of the image
    strength: float = 1.0  # of the color distortion; only the simclr set has a choice
    blur: bool = True  # off for views of about 32 pixels, as SimCLR's for CIFAR-10
    antialias: bool = False  # the official code has none

    def __post_init__(self) -> None:
        _at_least("views", self, size=8)
        _within("views", self, crop_area_min=(0.0, 1.0, True))
        _within("views", self, strength=(0.0, 1.25, True))
        if self.set == "paper" and self.strength != 1:
            raise ValueError("views.strength belongs to views.set=simclr; the paper's is fixed")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The encoder and the heads behind it."""

    name: str = "resnet50"  # as timm calls it
    width: int = 1  # multiplies the channels of a ResNet, its stem too
    small_stem: bool = False  # 3x3 without pool, for images of about 32 pixels
    same_pool: bool = False  # TensorFlow's max-pool, as in the official code
    first_shortcut: bool = False  # a projection in the first group of ResNet-18 and -34
    paper_init: bool = False  # truncated normal over fan-in
    zero_init_last: bool = True  # every block starts as its shortcut
    biased_variance: bool = False  # TensorFlow's running variance
    hidden: int = 4096  # of the projection and the predictor
    out: int = 256  # dimension of the sphere
    head_layers: int = 2  # of the projection; MoCo v3 and SimSiam have 3
    head_last_norm: bool = False  # a batch-norm after the projection, as theirs

    def __post_init__(self) -> None:
        _at_least("network", self, width=1, hidden=1, out=2, head_layers=1)
        if self.small_stem and self.same_pool:
            raise ValueError("network.same_pool must be false with small_stem, which has no pool")


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """How much of a view may pass into its representation."""

    kappa_e: float = 1024.0  # sharpness of e(z|x): the width of the channel, higher keeps more
    kappa_b: float = 10.0  # sharpness of b(z|y): one over SimCLR's temperature
    b_sees: Literal["own", "other"] = "own"  # bootstrap: the view of b(z|y); SimCLR's is the other
    beta: float = 1.0  # price of a nat that b(z|y) cannot predict; 0 is free
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of beta; others rise from 0
    warmup_epochs: float = 0.0  # of the linear schedule
    target_rate: float | None = None  # movable nats to steer beta toward; None leaves beta alone
    sample: bool = True  # draw z; without, z is its mode, and the rate closed
    rate: Literal["sample", "closed"] = "sample"  # estimate of the residual: at z, or over all z

    def __post_init__(self) -> None:
        _within("bottleneck", self, kappa_e=(0.0, math.inf, True), kappa_b=(0.0, math.inf, True))
        _within("bottleneck", self, beta=(0.0, math.inf, False))
        _at_least("bottleneck", self, warmup_epochs=0)
        if self.target_rate is not None:
            _within("bottleneck", self, target_rate=(0.0, math.inf, True))
            if self.schedule != "constant":
                raise ValueError("bottleneck.target_rate steers beta: schedule must be constant")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """How the other view is told from z."""

    own_view_negatives: bool = True  # contrastive: K = 2B - 1 candidates in place of B
    kappa_d: float = 4.0  # bootstrap: concentration of d(y'|z); the loss's weight is half of it

    def __post_init__(self) -> None:
        _within("decoder", self, kappa_d=(0.0, math.inf, True))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The slow network that BYOL and MoCo v3 learn from."""

    rate: float = 0.996  # how much it keeps of itself in a step, rising to 1 by a cosine
    independent: bool = True  # starts from its own random weights, as in the official code

    def __post_init__(self) -> None:
        _within("target", self, rate=(0.0, 1.0, False))


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How the weights move."""

    name: Literal["lars", "sgd", "adamw"] = "lars"  # the optimizer; LARS is for large batches
    lr: float = 0.2  # peak, for 256 images; it grows with the batch
    momentum: float = 0.9  # of lars and sgd
    weight_decay: float = 1.5e-6  # not of biases and batch norms
    trust: float = 0.001  # of lars
    warmup_epochs: float = 10.0  # the learning rate rises from 0; then it falls by a cosine

    def __post_init__(self) -> None:
        _within("optim", self, lr=(0.0, math.inf, True), trust=(0.0, math.inf, True))
        _within("optim", self, momentum=(0.0, 0.9999, False))
        _within("optim", self, weight_decay=(0.0, math.inf, False))
        _at_least("optim", self, warmup_epochs=0)


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, in what portions, and on what."""

    epochs: int = 100  # how often each image is seen
    steps: int = 0  # 0: as many as the epochs make; else this many, whatever the epochs
    batch: int = 512  # images of all processes together
    accumulate: int = 1  # portions of a batch, one after the other; bootstrap methods only
    device: str = "auto"  # cuda where there is one
    precision: Literal["auto", "bf16", "float32"] = "auto"  # bf16 on a GPU; losses are float32
    compile: Literal["auto", "yes", "no"] = "auto"  # yes on a GPU
    recompute: bool = False  # make norms and activations again on the way back: less memory, slower
    save_every: float = 10.0  # minutes between checkpoints
    log_every: int = 0  # steps between lines of metrics.jsonl; 0: about ten an epoch
    tensorboard: bool = True  # also write event files, for the tensorboard program

    def __post_init__(self) -> None:
        _at_least("train", self, epochs=1, steps=0, batch=2, accumulate=1, log_every=0)
        _within("train", self, save_every=(0.0, math.inf, True))
        if self.batch % self.accumulate:
            raise ValueError(
                f"train.accumulate must divide train.batch, {self.batch}, got {self.accumulate}"
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

    tries: int = 3  # returns to a good checkpoint; after that the run ends with an error
    spike: float = 3.0  # a loss so many deviations above its recent mean is a spike
    collapse_std: float = 0.1  # least spread of directions, as a share of what is uniform
    min_rank: float = 1.5  # fewest axes of the projections; BYOL was at 3 and recovered

    def __post_init__(self) -> None:
        _at_least("health", self, tries=0, spike=0, collapse_std=0, min_rank=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    recipe: str = ""  # the recipe it began with
    method: Method = "c-simclr"  # c- is the compressed one
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
        _within("", self, seed=(0, 2**32 - 1, False))
        if self.bottleneck.target_rate is not None and not is_compressed(self):
            raise ValueError(
                f"bottleneck.target_rate steers what {self.method} does not have; "
                f"use method=c-{self.method}"
            )
        if self.train.accumulate > 1 and is_contrastive(self):
            raise ValueError(
                f"train.accumulate must be 1 for {self.method}, whose images are each other's "
                "negatives; lower train.batch, or use more processes"
            )


def is_contrastive(config: Config) -> bool:
    """Whether images are told apart from each other (SimCLR, MoCo v3), not only predicted."""
    return config.method.removeprefix("c-") in ("simclr", "moco-v3")


def is_compressed(config: Config) -> bool:
    """Whether z is drawn and its residual information priced."""
    return config.method.startswith("c-")


def unused_settings(config: Config) -> dict[str, str]:
    """Settings that a run does not look at, the others being as they are, each with the reason."""
    method, optimizer = config.method, config.optim.name
    is_plain, is_bootstrap = not is_compressed(config), not is_contrastive(config)
    is_moco, is_slow = "moco" in method, "moco" in method or "byol" in method
    is_deep = config.network.name in ("resnet50", "resnet101", "resnet152")
    is_bare = config.network.head_layers == 1 and "simclr" in method  # which has no predictor
    # Of two reasons the first is told.
    rules = (
        (is_plain, f"only c-{method} is compressed", _OF_COMPRESSION),
        (config.bottleneck.schedule != "linear", "bottleneck.schedule is not linear", _RISE),
        (is_plain and is_bootstrap, f"{method} has no temperature", "bottleneck.kappa_b"),
        (not is_bootstrap, f"b(z|y) of {method} sees the other view", "bottleneck.b_sees"),
        (not is_bootstrap, f"{method} has no decoder of its own", "decoder.kappa_d"),
        (is_bootstrap, f"{method} has no negatives", "decoder.own_view_negatives"),
        (is_moco, f"{method} takes those of the other view", "decoder.own_view_negatives"),
        (not is_slow, f"{method} has no slow target", "target.rate target.independent"),
        (optimizer == "adamw", "optim.name is adamw", "optim.momentum"),
        (optimizer != "lars", f"optim.name is {optimizer}", "optim.trust"),
        (config.views.set == "paper", "views.set is paper", "views.strength"),
        (not config.bottleneck.sample, "z is not drawn", "bottleneck.rate"),
        (config.train.steps > 0, "train.steps is given", "train.epochs"),
        (is_bare, "there is no layer between", "network.hidden"),
        (is_deep, "only ResNet-18 and -34 would be without", "network.first_shortcut"),
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


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    result: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            result |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            result[name] = value
    return result


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
