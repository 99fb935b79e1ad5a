"""Backbones by their timm names, the paper's ResNets and heads, and the EMA target."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import check_one_of, validates_inputs
from compressive.config import RESNETS, Network, ResNetVariant, Stem
from compressive.distributed import local_shard
from compressive.platforms.shapes_only import shapes_only
from compressive.platforms.timm_import import import_timm

__all__ = ["RESNETS", "Ema", "backbone", "build", "feature_dim", "linear", "mlp"]

timm = import_timm()
STEMS: tuple[Stem, ...] = get_args(Stem)
VARIANTS: tuple[ResNetVariant, ...] = get_args(ResNetVariant)

# Standard deviation of a standard normal truncated at +-2 (TensorFlow's constant).
_CUT_STD = 0.87962566103423978


@validates_inputs
def backbone(
    name: str,
    *,
    width: int = 1,
    stem: Stem = "imagenet",
    variant: ResNetVariant = "timm",
    zero_init_last: bool = True,
    biased_variance: bool = False,
    **timm_options: Any,
) -> nn.Module:
    """Return the named timm network with random weights and without its classifier.

    It maps images to what timm passes to the classifier: the global average pool of a convnet, the
    class token of a ViT. timm gets the `timm_options`, such as `img_size=32` or
    `drop_path_rate=0.1`. The other settings are for `RESNETS` only. With their defaults the ResNet
    is timm's own.

    width: multiplies every channel count, also of the stem. With 2, ResNet-50 has 4096 features.
    stem: "cifar" is a 3x3 convolution of stride 1 without a pool, for images of about 32 pixels.
    variant: "official" is the ResNet of the paper's code, except for its biased running variance:
        - TensorFlow's max-pool (`SamePool`). timm loads the weights but computes different features
          (by 4 % at 224 pixels). Converted weights need it.
        - ResNet-18 and -34 have a 1x1 projection in their first group, which timm cannot load.
        - Kernels are initialized by a truncated normal over fan-in, not a normal over fan-out.
    zero_init_last: initializes every block as its shortcut.
    biased_variance: averages the biased batch variance, as TensorFlow does, without torch's factor
        n / (n - 1). `SyncBatchNorm.convert_sync_batchnorm` reverts it; see `sync_batchnorm`.
    """
    require_known(name)
    if name not in RESNETS:
        _refuse(
            name,
            width=width != 1,
            stem=stem != "imagenet",
            variant=variant != "timm",
            zero_init_last=not zero_init_last,
            biased_variance=biased_variance,
        )
        return timm.create_model(name, num_classes=0, **timm_options)
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be a whole number of 1 or more, got {width!r}")
    check_one_of(STEMS, stem=stem)
    check_one_of(VARIANTS, variant=variant)
    norm = _BiasedBatchNorm2d if biased_variance else nn.BatchNorm2d
    network = _resnet(name, width, norm, zero_init_last, timm_options)
    channels = 64 * width
    if stem == "cifar":
        network.conv1 = _conv(network.in_chans, channels, 3, stride=1)
        network.maxpool = nn.Identity()
    elif width > 1:
        network.conv1 = _conv(network.in_chans, channels, 7, stride=2)
    if variant == "timm":
        return network
    if stem == "imagenet":
        network.maxpool = SamePool()
    if network.layer1[0].downsample is None:
        project = nn.Sequential(_conv(channels, channels, 1, stride=1), norm(channels))
        network.layer1[0].downsample = project
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            _init_truncated_normal(module.weight)
    return network


def build(settings: Network, size: int, *, biased_variance: bool = False) -> nn.Module:
    """Build the backbone that these settings describe, for images of this size."""
    names = ("width", "stem", "variant", "zero_init_last")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    options["biased_variance"] = biased_variance
    if settings.name not in RESNETS:
        with shapes_only():  # only to read its configuration
            known: Any = backbone(settings.name, **options)
        if known.pretrained_cfg.get("fixed_input_size"):
            options["img_size"] = size
    if not settings.drop_path:
        return backbone(settings.name, **options)
    try:
        return backbone(settings.name, **options, drop_path_rate=settings.drop_path)
    except TypeError:
        raise ValueError(
            f"{settings.name} has no stochastic depth: network.drop_path must be 0, got "
            f"{settings.drop_path:g}"
        ) from None


def feature_dim(network: nn.Module) -> int:
    """Return the length of a backbone's feature vector."""
    # Not num_features: for networks with layers between pool and classifier (VGG, MobileNet) it is
    # the number of channels before these layers.
    size = getattr(network, "head_hidden_size", None)
    if not isinstance(size, int):
        name = type(network).__name__
        raise ValueError(f"{name} must have the length of its features as head_hidden_size")
    return size


def fits(network: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights have the names and shapes of the network's."""
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    return shapes == {name: value.shape for name, value in weights.items()}


def mlp(
    in_dim: int,
    hidden: int = 4096,
    out_dim: int = 256,
    *,
    layers: int = 2,
    last_norm: bool = False,
    biased_variance: bool = False,
) -> nn.Sequential:
    """Build a head: linear, batch norm, ReLU, then linear; no biases; the paper's initializer."""
    # The defaults fit the projection of the paper's methods, BYOL's predictor, and q and m of
    # C-BYOL. The projections of MoCo v3 and SimSiam have three layers and a last batch norm.
    if layers < 1:
        raise ValueError(f"layers must be 1 or more, got {layers}")
    norm = _BiasedBatchNorm1d if biased_variance else nn.BatchNorm1d
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [linear(in_dim, hidden), norm(hidden), nn.ReLU(inplace=True)]
        in_dim = hidden
    parts.append(linear(in_dim, out_dim))
    if last_norm:
        parts.append(norm(out_dim))
    return nn.Sequential(*parts)


def linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Build a linear map without bias, with the paper's initializer, such as l of C-BYOL."""
    layer = nn.Linear(in_dim, out_dim, bias=False)
    _init_truncated_normal(layer.weight)
    return layer


class Ema(nn.Module):
    """Target network: its weights are a moving average of those of an online network.

    `network` has the architecture of the online encoder and projection, and keeps its initial
    weights. They are independent in the official code; pass `copy.deepcopy(online)` for equal ones.
    Batch-norm statistics are the target's own, not averages. It has no gradients.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: nn.Module = network.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x, without gradient."""
        return self.network(x)

    @torch.no_grad()
    def update(self, online: nn.Module, decay: float) -> None:
        """Set weights to decay * weights + (1 - decay) * online weights; call it after a step."""
        # This never waits for the device. In the official code `decay` depends on the number of
        # steps before this one.
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        ours, theirs = tuple(self.network.parameters()), tuple(online.parameters())
        if [p.shape for p in ours] != [p.shape for p in theirs]:
            own, other = (sum(p.numel() for p in weights) for weights in (ours, theirs))
            raise ValueError(
                "online must have weights of the same shapes as the target; it has "
                f"{len(theirs)} tensors of {other:,} numbers, the target {len(ours)} of {own:,}"
            )
        # Sharded weights are split alike, so each process updates its own part.
        own, other = ([local_shard(p) for p in weights] for weights in (ours, theirs))
        torch._foreach_lerp_(own, other, 1 - decay)


class SamePool(nn.Module):
    """TensorFlow's 3x3 max-pool of stride 2 with 'SAME' padding."""

    # An odd side is padded by one at both ends, as in torch. An even side is padded at its end
    # only; `ceil_mode` does this without a copy.

    def forward(self, x: Float[Tensor, "batch feat h w"]) -> Float[Tensor, "batch feat h2 w2"]:
        """Halve each side, rounded up."""
        h, w = x.shape[-2:]
        return F.max_pool2d(x, 3, 2, padding=(h % 2, w % 2), ceil_mode=True)


class _BiasedBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Float[Tensor, "batch feat h w"]) -> Float[Tensor, "batch feat h w"]:
        return _biased(self, x) if self.training else super().forward(x)


class _BiasedBatchNorm1d(nn.BatchNorm1d):
    def forward(self, x: Float[Tensor, "batch feat"]) -> Float[Tensor, "batch feat"]:
        return _biased(self, x) if self.training else super().forward(x)


def _biased(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalize by the batch, and update the statistics with its mean and biased variance."""
    mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert count is not None
    assert norm.momentum is not None
    # Pass copies: autograd saves them for the backward pass and rejects tensors that a second view
    # has changed.
    new_mean, new_var = mean.clone(), var.clone()
    out = F.batch_norm(x, new_mean, new_var, norm.weight, norm.bias, True, norm.momentum, norm.eps)
    n = x.numel() // x.shape[1]
    with torch.no_grad():
        count.add_(1)
        mean.copy_(new_mean)
        # Convert new_var = (1 - m) var + m n/(n-1) batch to (1 - m) var + m batch.
        var.mul_((1 - norm.momentum) / n).add_(new_var, alpha=(n - 1) / n)
    return out


def _resnet(
    name: str, width: int, norm: type[nn.Module], zero_init_last: bool, options: dict[str, Any]
) -> Any:
    """Build timm's ResNet with wider stages; if width > 1, the caller replaces `conv1`."""
    if width > 1:
        # timm's plain stem always has 64 channels. A deep stem has 2 * stem_width, so that its norm
        # and the first group fit. Only `conv1` of the deep stem has to be replaced.
        stages = tuple(64 * width * 2**stage for stage in range(4))
        options = {**options, "channels": stages, "stem_type": "deep", "stem_width": 32 * width}
    network = timm.create_model(
        name, num_classes=0, norm_layer=norm, zero_init_last=zero_init_last, **options
    )
    assert isinstance(network, timm.models.ResNet)
    return network


def _conv(in_dim: int, out_dim: int, kernel: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_dim, out_dim, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as in timm
    return conv


def _init_truncated_normal(weight: Tensor) -> None:
    """Initialize as Keras' VarianceScaling: normal, truncated at 2 sigma, variance 1 / fan-in."""
    sigma = math.sqrt(1 / weight[0].numel()) / _CUT_STD
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def _refuse(name: str, **asked: bool) -> None:
    if changed := [setting for setting, is_asked in asked.items() if is_asked]:
        plain = {"width": "1", "stem": "imagenet", "variant": "timm", "zero_init_last": "true"}
        without = " ".join(f"--set network.{one}={plain.get(one, 'false')}" for one in changed)
        only = f"only {', '.join(RESNETS)} do"
        raise ValueError(f"{name!r} does not support {', '.join(changed)}; {only}: {without}")


def require_known(name: str) -> None:
    """Raise ValueError if timm has no such network, or if the name has a tag of weights."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see timm.list_models()"
        raise ValueError(f"timm has no network {name!r}; {hint}")
    if "." in name:
        rule = "must be without the tag of pretrained weights"
        plain, hint = name.partition(".")[0], f"to start from these weights, give --weights {name}"
        raise ValueError(f"network.name {rule}: {plain!r}, got {name!r}; {hint}")
