"""The settings of a run: frozen dataclasses, changed by dotted name, stored as JSON."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

from compressive.setting_fields import (
    build,
    check_fields,
    info,
    parse,
    require_one_of,
    setting,
    similar_settings,
    type_hints,
)

__all__ = ["METHODS", "Bottleneck", "Config", "Data", "Decoder", "Health", "MethodInfo", "Network"]
__all__ += ["Optim", "Probe", "ResNetVariant", "Stem", "Target", "Train", "Views"]
__all__ += ["channels", "channels_text", "check_device_name", "flat", "total_steps"]
__all__ += ["tracker_names"]
__all__ += ["from_dict", "is_compressed", "method_info", "override", "unused_settings", "with_data"]
DEVICE_NAMES = "auto, cpu, cuda, cuda:N, rocm, xpu or mps"


class MethodInfo(NamedTuple):
    """Facts about a method that need no torch: its file in `compressive.methods`, and its parts."""

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
    **dict.fromkeys(("simclr", "c-simclr"), _SIMCLR),
    **dict.fromkeys(("byol", "c-byol"), _BYOL),
    **dict.fromkeys(("moco-v3", "c-moco-v3"), _MOCO),
    **dict.fromkeys(("simsiam", "c-simsiam"), _SIMSIAM),
    "dcl": MethodInfo("dcl", True, temperature=True, same_view_negatives=True),
    "vicreg": MethodInfo("vicreg", True),
}
FINETUNE_METHOD = "finetune"  # `compressive finetune` sets it: the method learns from labels
_SUPERVISED = MethodInfo("supervised")
TRACKERS = ("wandb", "mlflow", "trackio")  # for train.track; each is an extra of this package
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")  # with network.stem
Stem = Literal["imagenet", "cifar"]
ResNetVariant = Literal["timm", "official"]


def _not_compressed(config: "Config") -> str:
    if is_compressed(config):
        return ""
    method, compressed = config.method, f"c-{config.method}"
    only = f"only {compressed} is" if compressed in METHODS else f"{method} is not"
    return f"{only} compressed"


def _has_no(config: "Config", part: str) -> str:
    return f"{config.method} has no {part}"


def _no_beta_warmup(config: "Config") -> str:
    if config.bottleneck.target_residual is not None:
        return "bottleneck.target_residual sets beta"
    has_warmup = config.bottleneck.schedule in ("linear", "adaptive")
    return "" if has_warmup else "bottleneck.schedule is neither linear nor adaptive"


def _not_adaptive(config: "Config") -> str:
    is_adaptive = config.bottleneck.schedule == "adaptive"
    return "" if is_adaptive else "bottleneck.schedule is not adaptive"


def _no_temperature(config: "Config") -> str:
    is_read = is_compressed(config) or method_info(config).temperature
    return "" if is_read else _has_no(config, "temperature")


def _unless_method_has(part: str, called: str) -> Callable[["Config"], str]:
    return lambda c: "" if getattr(method_info(c), part) else _has_no(c, called)


def _other_view_only(config: "Config") -> str:
    reads_other = f"b(z|y) of {config.method} always takes the other view"
    return "" if method_info(config).decoder else reads_other


def _no_hidden_layer(config: "Config") -> str:
    has_hidden = config.network.head_layers > 1 or method_info(config).predictor
    return "" if has_hidden else "network.head_layers is 1 and there is no predictor"


def channels(text: str, setting: str) -> tuple[float, ...]:
    """Return the three numbers of a setting; raise ValueError, with its name, for anything else."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if len(found) != 3 or not all(map(math.isfinite, found)):
        rule = "must be three numbers with commas, such as 0.5,0.5,0.5"
        raise ValueError(f"{setting} {rule}, got {text!r}")
    return found


def channels_text(values: tuple[float, ...]) -> str:
    """Return numbers as the text of a setting, without rounding."""
    return ",".join(map(repr, values))


def check_device_name(name: str, setting: str) -> None:
    """Raise ValueError, with the name of the setting, if this is not the name of a device."""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|rocm|hip|xpu)(:\d+)?", name):
        raise ValueError(f"{setting} must be {DEVICE_NAMES}, got {name!r}")


class _Section:
    """A group of settings; checks types and bounds when it is created."""

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__.lower()}.")


@dataclass(frozen=True, kw_only=True)
class Data(_Section):
    """The images to train on."""

    source: str = setting("builtin", "a folder, archive or list, torchvision:NAME, or builtin")
    split: str = setting("train", "split of the source to train on")
    labels: Literal["folder", "none"] = setting(
        "folder",
        "folder: use names of class folders and labels of shards, only to measure accuracy; none: "
        "ignore them",
    )
    max_side: int = setting(
        0,
        "shrink images to this many pixels on the longer side; 0: chosen by images and views.size",
    )
    cache_on_device: Literal["auto", "yes", "split", "no"] = setting(
        "auto",
        "decode all images once and keep them as uint8 on the device; split: each process keeps a "
        "share; auto: all if they fit, else a share if it fits",
    )
    decode_on_device: Literal["auto", "yes", "no"] = setting(
        "no",  # until nvJPEG has been measured on a GPU
        "decode JPEG files on an NVIDIA GPU; auto: if it has a JPEG engine and 1,000 or more "
        "images, most of them JPEG, are not cached",
    )
    workers: int = setting(
        0,
        "threads that decode images that are not cached; 0: chosen by the time of a read",
    )
    limit: int = setting(0, "use a random subset of this many images; 0: all")
    max_pixels: int = setting(
        178_956_970, "skip images with more pixels, which take three bytes each per thread", low=1
    )


@dataclass(frozen=True, kw_only=True)
class Views(_Section):
    """The random augmentations that make the two views of an image."""

    size: int = setting(224, "side of a view in pixels", low=8)
    policy: Literal["byol", "simclr", "crop"] = setting(
        "byol",
        "byol: t and t' of the paper's Table 6; simclr: SimCLR's augmentation for both views; "
        "crop: only random crops and flips, as in fine-tuning",
    )
    crop_scale_min: float = setting(
        0.08, "smallest crop as a fraction of the image area", high=1, open_low=True
    )
    strength: float = setting(
        1.0,
        "strength of the color distortion",
        high=1.25,
        open_low=True,
        unused=lambda c: "" if c.views.policy == "simclr" else f"views.policy is {c.views.policy}",
    )
    blur: bool = setting(
        True,
        "blur at random; SimCLR turns it off for CIFAR-10, whose views have 32 pixels",
        unused=lambda c: "views.policy is crop" if c.views.policy == "crop" else "",
    )
    antialias: bool = setting(False, "anti-alias resized crops; the official code does not")
    mean: str = setting(
        "0.485,0.456,0.406", "mean of the three channels that views are normalized with; ImageNet's"
    )
    std: str = setting(
        "0.229,0.224,0.225", "standard deviation that views are normalized with; ImageNet's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        channels(self.mean, "views.mean")
        if min(channels(self.std, "views.std")) <= 0:
            raise ValueError(f"views.std must be above 0 in every channel, got {self.std!r}")
        if self.policy == "byol" and self.strength != 1:
            rule = f"views.strength must be 1 for views.policy=byol, got {self.strength:g}"
            raise ValueError(f"{rule}; views.policy=simclr allows other values")


@dataclass(frozen=True, kw_only=True)
class Network(_Section):
    """The encoder and its projection and prediction heads."""

    name: str = setting("resnet50", "timm model name")
    weights: str = setting(
        "", "weights that the encoder starts from; a run, a file, a timm name or an hf-hub: id"
    )
    width: int = setting(1, "multiplies the channels of a ResNet, including its stem", low=1)
    stem: Stem = setting(  # noqa: RUF009
        "imagenet", "cifar: a 3x3 convolution without pooling, for images of about 32 pixels"
    )
    variant: ResNetVariant = setting("timm", "ResNet of timm or of the official code")  # noqa: RUF009
    zero_init_last: bool = setting(True, "initialize every residual block as its shortcut")
    drop_path: float = setting(
        0.0, "stochastic depth: rate at which the last residual block is skipped", high=0.9
    )
    hidden_dim: int = setting(
        4096, "hidden dimension of the projection and predictor", low=1, unused=_no_hidden_layer
    )
    projection_dim: int = setting(256, "output dimension of the projection", low=2)
    head_layers: int = setting(2, "layers of the projection; 3 in MoCo v3 and SimSiam", low=1)
    head_last_norm: bool = setting(
        False, "batch norm after the last layer of the projection, as in MoCo v3 and SimSiam"
    )


@dataclass(frozen=True, kw_only=True)
class Bottleneck(_Section):
    """The distributions e(z|x) and b(z|y) and the penalty on residual information."""

    kappa_e: float = setting(
        1024.0,
        "concentration of e(z|x); a higher value lets z keep more information",
        low=0,
        open_low=True,
        unused=_not_compressed,
    )
    kappa_b: float = setting(
        10.0,
        "concentration of b(z|y); 1 / temperature in SimCLR",
        low=0,
        open_low=True,
        unused=_no_temperature,
    )
    backward_view: Literal["own", "other"] = setting(
        "own",
        "view that b(z|y) of a bootstrap method encodes; contrastive methods take the other view",
        unused=lambda c: _not_compressed(c) or _other_view_only(c),
    )
    beta: float = setting(
        1.0,
        "weight of the penalty on information that the other view cannot predict; 0 turns it off",
        low=0,
        unused=_not_compressed,
    )
    schedule: Literal["constant", "linear", "cosine", "adaptive"] = setting(
        "constant",
        "schedule of beta; linear and cosine increase it from 0, adaptive multiplies it for each "
        "image by how well z predicts the other view",
        unused=_not_compressed,
    )
    adaptive_weight: Literal["likelihood", "rank"] = setting(
        "likelihood",
        "factor of the adaptive schedule: likelihood of the other view, or rank in the batch",
        unused=lambda c: _not_compressed(c) or _not_adaptive(c),
    )
    warmup_epochs: float = setting(
        0.0,
        "epochs over which the linear and adaptive schedules increase beta from 0",
        low=0,
        unused=lambda c: _not_compressed(c) or _no_beta_warmup(c),
    )
    target_residual: float | None = setting(
        None,
        "adjust beta to reach this reducible residual in nats; none: beta follows its schedule",
        low=0,
        open_low=True,
        unused=_not_compressed,
    )
    stochastic: bool = setting(
        True,
        "sample z; false: use the mode of e(z|x) and the analytic residual",
        unused=_not_compressed,
    )
    residual_estimator: Literal["sampled", "analytic"] = setting(
        "sampled",
        "evaluate the residual at the sampled z, or in closed form",
        unused=lambda c: (
            _not_compressed(c) or ("" if c.bottleneck.stochastic else "z is not drawn")
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_residual is not None and self.schedule in ("linear", "cosine"):
            raise ValueError(
                "bottleneck.schedule must be constant or adaptive with "
                f"bottleneck.target_residual, which adjusts beta, got {self.schedule!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Decoder(_Section):
    """The decoder d(y|z) that predicts the other view."""

    same_view_negatives: bool = setting(
        True,
        "compare with both views of other images: 2B - 1 candidates in a batch of B; false: B",
        unused=_unless_method_has("same_view_negatives", "negatives of the same view"),
    )
    kappa_d: float = setting(
        4.0,
        "bootstrap methods: concentration of d(y'|z), twice the weight of the loss",
        open_low=True,
        unused=_unless_method_has("decoder", "vMF decoder"),
    )


@dataclass(frozen=True, kw_only=True)
class Target(_Section):
    """The moving-average target network of BYOL and MoCo v3."""

    ema_decay: float = setting(
        0.996,
        "initial decay of the moving average; increases to 1 with a cosine schedule",
        high=1,
        unused=_unless_method_has("ema_target", "EMA target"),
    )
    independent: bool = setting(
        True,
        "initialize the target independently, as the official code does; false: as a copy",
        unused=_unless_method_has("ema_target", "EMA target"),
    )


@dataclass(frozen=True, kw_only=True)
class Optim(_Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["lars", "sgd", "adamw"] = setting("lars", "optimizer; LARS is for large batches")
    lr: float = setting(
        0.2, "peak learning rate for 256 images; scaled with the batch size", open_low=True
    )
    momentum: float = setting(
        0.9,
        "momentum of lars and sgd",
        high=0.9999,
        unused=lambda c: "optim.name is adamw" if c.optim.name == "adamw" else "",
    )
    nesterov: bool = setting(
        False,
        "use Nesterov's momentum in sgd, as fine-tuning does",
        unused=lambda c: "" if c.optim.name == "sgd" else f"optim.name is {c.optim.name}",
    )
    weight_decay: float = setting(1.5e-6, "weight decay; not applied to biases and batch norms")
    trust_coefficient: float = setting(
        0.001,
        "trust coefficient of lars",
        open_low=True,
        unused=lambda c: "" if c.optim.name == "lars" else f"optim.name is {c.optim.name}",
    )
    warmup_epochs: float = setting(
        10.0, "epochs of linear warm-up; then the learning rate decays by a cosine"
    )
    clip_norm: float = setting(
        0.0, "scale gradients down to this norm over all weights; 0: do not", low=0
    )
    layer_decay: float = setting(
        1.0,
        "factor on the learning rate of the encoder per block below its end, as in timm; 1: none",
        high=1,
        open_low=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("optim.momentum must be above 0 with optim.nesterov=true, got 0")


@dataclass(frozen=True, kw_only=True)
class Train(_Section):
    """Length of the run, batches, hardware, and what is written."""

    epochs: int = setting(
        100,
        "passes over the images",
        low=1,
        unused=lambda c: "train.steps is given" if c.train.steps > 0 else "",
    )
    steps: int = setting(0, "train for this many steps; 0: as train.epochs says")
    frozen_epochs: float = setting(
        0.0, "epochs at the start in which the encoder's weights stay fixed; heads are trained"
    )
    batch_size: int = setting(512, "images per step over all processes", low=2)
    grad_accum_steps: int = setting(
        1, "split a batch into this many parts to save memory; bootstrap methods only", low=1
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "several processes: ddp: each has all weights; fsdp: each has a part of them",
    )
    batch_norm_ranks: int = setting(
        0, "consecutive processes that share the statistics of batch norms; 0: all, 1: each its own"
    )
    gather_chunk: int | None = setting(
        None,
        "images per process that are gathered and compared at a time, to save memory; 0: all; "
        "none: all up to 2^26 pairs per process",
        unused=_unless_method_has("temperature", "candidates"),
    )
    device: str = setting("auto", f"{DEVICE_NAMES}; auto: cuda, xpu or mps if there is one")
    precision: Literal["auto", "bf16", "float32"] = setting(
        "auto", "auto: bf16 on cuda; losses are always float32"
    )
    compile: Literal["auto", "yes", "no"] = setting("auto", "use torch.compile; auto: on cuda")
    fused_norm: Literal["auto", "yes", "no"] = setting(
        "no",
        "batch norms of ResNets as Triton kernels; auto: if a single process compiles for CUDA and "
        "network.stem is imagenet",
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, slower"
    )
    save_every: float = setting(10.0, "minutes between checkpoints", open_low=True)
    log_every: int = setting(
        0, "steps between lines of metrics.jsonl; 0: about ten lines per epoch"
    )
    tensorboard: bool = setting(True, "also write TensorBoard event files")
    track: str = setting("", "also log to these trackers, with commas: wandb, mlflow, trackio")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device_name(self.device, "train.device")
        tracker_names(self.track)
        if self.parallel == "fsdp" and self.compile == "yes":
            rule = "train.compile must be auto or no with train.parallel=fsdp"
            raise ValueError(f"{rule}, which does not compile the network, got yes")
        if self.fused_norm == "yes" and (self.compile == "no" or self.activation_checkpointing):
            other = "compile=no" if self.compile == "no" else "activation_checkpointing=true"
            rule = f"train.fused_norm must be auto or no with train.{other}"
            raise ValueError(f"{rule}; its kernels need compiled steps that store activations")
        if self.batch_size % self.grad_accum_steps:
            rule = f"train.grad_accum_steps must divide train.batch_size, {self.batch_size}"
            raise ValueError(f"{rule}, got {self.grad_accum_steps}")


@dataclass(frozen=True, kw_only=True)
class Probe(_Section):
    """The linear probe and kNN during training; labels never influence the encoder."""

    holdout: float = setting(
        0.1, "fraction of the labeled images held out to test probe and kNN", high=0.9
    )
    every_epochs: float = setting(0.0, "epochs between evaluations; 0: twenty per run")
    neighbors: int = setting(20, "neighbors that vote in kNN", low=1)
    bank: int = setting(20_000, "images in which kNN searches", low=1)
    lr: float = setting(1e-3, "learning rate of the linear probe", open_low=True)


@dataclass(frozen=True, kw_only=True)
class Health(_Section):
    """When a run counts as diverged or collapsed, and how often it may restart."""

    max_restarts: int = setting(
        3, "restarts from the last good checkpoint before the run ends with an error"
    )
    spike_sigma: float = setting(
        3.0, "a loss this many standard deviations above its recent mean is a spike"
    )
    collapse_std: float = setting(
        0.1, "smallest standard deviation of the directions, relative to uniform ones"
    )
    min_participation_ratio: float = setting(
        1.5, "smallest participation ratio of the projections; BYOL was at 3 and recovered"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that belong to no section."""

    recipe: str = setting("", "the recipe that the settings are based on")
    method: str = setting(
        "c-simclr",
        "c- is the compressed method; `compressive finetune` sets finetune",
        choices=(*METHODS, FINETUNE_METHOD),
    )
    seed: int = setting(0, "seed of data order, views, weights and z", high=2**32 - 1)
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
        check_fields(self)
        residual, parts = self.bottleneck.target_residual, self.train.grad_accum_steps
        if residual is not None and not is_compressed(self):
            rule = f"bottleneck.target_residual must be none for method={self.method}"
            raise ValueError(f"{rule}, got {residual:g}: {_not_compressed(self)}")
        if parts > 1 and method_info(self).compares_images:
            raise ValueError(
                f"train.grad_accum_steps must be 1 for {self.method}, whose loss compares the "
                f"images of a batch, got {parts}; lower train.batch_size, or use more processes"
            )


def method_info(config: Config) -> MethodInfo:
    """Return the facts about the config's method."""
    return _SUPERVISED if config.method == FINETUNE_METHOD else METHODS[config.method]


def is_compressed(config: Config) -> bool:
    """Return whether z is stochastic and its residual information penalized."""
    return config.method.startswith("c-")


def tracker_names(text: str) -> list[str]:
    """Return the names in train.track, each once; raise ValueError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        require_one_of("train.track", name, TRACKERS)
    return list(dict.fromkeys(names))


def unused_settings(config: Config) -> dict[str, str]:
    """Return the settings that a run with this config does not read, each with the reason."""
    reasons = {}
    for section in ("", *(each.name for each in fields(Config) if "setting" not in each.metadata)):
        group: Any = getattr(config, section) if section else config
        for each in fields(group):
            if "setting" in each.metadata and (reason := info(each).unused(config)):
                reasons[f"{section}.{each.name}" if section else each.name] = reason
    return reasons


def override(config: Config, *changes: str) -> Config:
    """Return the config with settings changed, each given as "section.name=value", in any order."""
    settings = asdict(config)
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"a change must be NAME=VALUE, such as optim.lr=0.3, got {change!r}")
        _set(settings, name.strip(), text.strip())
    return from_dict(settings)


def with_data(config: Config, data: str, *changes: str) -> Config:
    """Return the config with this data source and changes to other settings, but not the recipe."""
    base = override(config, f"data.source={data}")
    changed = override(base, *changes)
    for name in ("recipe", "data.source"):
        if (value := flat(changed)[name]) != flat(base)[name]:
            hint = "give images as DATA and a recipe with --recipe"
            raise ValueError(f"{name} cannot be set to {value!r}; {hint}")
    return changed


def from_dict(settings: dict[str, Any]) -> Config:
    """Return the config of nested settings (`dataclasses.asdict`); unknown names are errors."""
    return build(Config, settings)


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
    for name, value in (("batch", batch), ("examples", examples)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if epochs < 0:
        raise ValueError(f"epochs must be 0 or more, got {epochs}")
    return examples * epochs // batch + 1


def _set(settings: dict[str, Any], name: str, text: str) -> None:
    """Parse a value and store it under its dotted name."""
    section, _, leaf = name.rpartition(".")
    kind: Any = type_hints(Config).get(section) if section else Config
    if name not in flat(settings):
        names = [*flat(settings)]
        if name in settings:
            inside = ", ".join(n for n in names if n.startswith(f"{name}."))
            raise ValueError(f"{name} is a section; it has {inside}")
        near = similar_settings(name, names)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        inside = ", ".join(settings[section]) if is_dataclass(kind) and section else ""
        rest = f"{section} has {inside}" if inside else "`compressive settings` lists all"
        raise ValueError(f"no setting {name!r}; {hint}{rest}")
    into = settings[section] if section else settings
    into[leaf] = parse(text, type_hints(kind)[leaf], name)
