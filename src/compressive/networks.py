"""Backbones by their timm names, the paper's ResNets and heads, and the target that follows."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, get_args

import timm
import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.models.resnet import ResNet
from torch import Tensor, nn

from compressive.checks import check_one_of, validates_inputs
from compressive.config import RESNETS, Network, ResNetVariant, Stem

__all__ = ["RESNETS", "Ema", "backbone", "build", "feature_dim", "linear", "mlp"]

STEMS: tuple[Stem, ...] = get_args(Stem)
VARIANTS: tuple[ResNetVariant, ...] = get_args(ResNetVariant)

# Standard deviation of a standard normal that is cut at +-2 (TensorFlow's constant).
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
    """Return the timm network of that name with random weights and without its classifier.

    It maps images to what timm passes to the classifier: the global average pool of a convnet, the
    class token of a ViT. `timm_options` go to timm, such as `img_size=32` or `drop_path_rate=0.1`.
    The other settings are for `RESNETS` only. With their defaults the ResNet is timm's own.

    width: multiplies every channel count, the stem's too. 2 makes ResNet-50's features 4096-d.
    stem: "cifar" is a 3x3 convolution of stride 1 without a pool, for images of about 32 pixels.
    variant: "official" is the ResNet of the paper's code, but for its biased running variance:
        - TensorFlow's max-pool (`SamePool`). timm loads the weights but computes different features
          (by 4 % at 224 pixels). Converted weights need it.
        - ResNet-18 and -34 have a 1x1 projection in their first group, which timm cannot load.
        - Kernels start from a truncated normal over fan-in; timm's are normal over fan-out.
    zero_init_last: every block starts as its shortcut.
    biased_variance: the running variance averages the batch's own, as TensorFlow's does, without
        torch's n / (n - 1). `SyncBatchNorm.convert_sync_batchnorm` goes back to torch's.
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
    """The backbone that these settings describe, for images of this size."""
    names = ("width", "stem", "variant", "zero_init_last")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    options["biased_variance"] = biased_variance
    if settings.name not in RESNETS:
        with torch.device("meta"):  # only to read what timm says of it
            known: Any = backbone(settings.name, **options)
        if known.pretrained_cfg.get("fixed_input_size"):
            options["img_size"] = size
    return backbone(settings.name, **options)


def feature_dim(network: nn.Module) -> int:
    """Length of the vector that a backbone makes of an image."""
    # Where timm keeps layers between pool and classifier (VGG, MobileNet), num_features is the
    # number of channels before them.
    size = getattr(network, "head_hidden_size", None)
    if not isinstance(size, int):
        name = type(network).__name__
        raise ValueError(f"{name} must say how long its features are: head_hidden_size")
    return size


def fits(network: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether these are all weights of the network, of their shapes."""
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
    # The defaults are the projection of the paper's methods, BYOL's predictor, q and m of C-BYOL.
    # MoCo v3 and SimSiam project with three `layers` and end in a batch-norm (`last_norm`).
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
    """A linear map without bias, with the paper's initializer: l of C-BYOL is one of 256 to 256."""
    layer = nn.Linear(in_dim, out_dim, bias=False)
    _init_truncated_normal(layer.weight)
    return layer


class Ema(nn.Module):
    """The target: a network whose weights are a moving average of those of an online network.

    `network` has the architecture of the online encoder and projection, and keeps its own initial
    weights: independent ones in the official code, or those of `copy.deepcopy(online)`. Batch-norm
    statistics are not averaged but the target's own. Nothing in it learns by gradient.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: nn.Module = network.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """What the target makes of x, without a gradient."""
        return self.network(x)

    @torch.no_grad()
    def update(self, online: nn.Module, decay: float) -> None:
        """After the optimizer's step: weights <- decay * weights + (1 - decay) * online's."""
        # Never waits for the device. The official `decay` counts the steps before this one.
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        ours, theirs = tuple(self.network.parameters()), tuple(online.parameters())
        if [p.shape for p in ours] != [p.shape for p in theirs]:
            own, other = (sum(p.numel() for p in weights) for weights in (ours, theirs))
            raise ValueError(
                "online must have the weights of the target, shape by shape; it has "
                f"{len(theirs)} tensors of {other:,} numbers, the target {len(ours)} of {own:,}"
            )
        torch._foreach_lerp_(ours, theirs, 1 - decay)


class SamePool(nn.Module):
    """TensorFlow's 3x3 max-pool of stride 2 with 'SAME' padding."""

    # An odd side is padded by one on both ends, as torch's pool does. An even side is padded at its
    # end only, which a window that may run over the end (`ceil_mode`) does without a copy.

    def forward(self, x: Float[Tensor, "batch feat h w"]) -> Float[Tensor, "batch feat h2 w2"]:
        """Half of each side, rounded up."""
        h, w = x.shape[-2:]
        return F.max_pool2d(x, 3, 2, padding=(h % 2, w % 2), ceil_mode=True)


class _BiasedBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Float[Tensor, "batch feat h w"]) -> Float[Tensor, "batch feat h w"]:
        return _biased(self, x) if self.training else super().forward(x)


class _BiasedBatchNorm1d(nn.BatchNorm1d):
    def forward(self, x: Float[Tensor, "batch feat"]) -> Float[Tensor, "batch feat"]:
        return _biased(self, x) if self.training else super().forward(x)


def _biased(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalize by the batch, and move the statistics toward its mean and biased variance."""
    mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert count is not None
    assert norm.momentum is not None
    # Autograd keeps what batch_norm gets for the backward pass, and would refuse it if a second
    # view had changed it since; so it gets copies.
    new_mean, new_var = mean.clone(), var.clone()
    out = F.batch_norm(x, new_mean, new_var, norm.weight, norm.bias, True, norm.momentum, norm.eps)
    n = x.numel() // x.shape[1]
    with torch.no_grad():
        count.add_(1)
        mean.copy_(new_mean)
        # new_var = (1 - m) var + m n/(n-1) batch; wanted is (1 - m) var + m batch.
        var.mul_((1 - norm.momentum) / n).add_(new_var, alpha=(n - 1) / n)
    return out


def _resnet(
    name: str, width: int, norm: type[nn.Module], zero_init_last: bool, options: dict[str, Any]
) -> Any:
    """timm's ResNet with wider stages; the stem convolution of a wide one is for the caller."""
    if width > 1:
        # timm fixes a plain stem at 64 channels. A deep one has 2 * stem_width, and then its norm
        # and the first group fit; of the deep stem itself only `conv1` is left to replace.
        stages = tuple(64 * width * 2**stage for stage in range(4))
        options = {**options, "channels": stages, "stem_type": "deep", "stem_width": 32 * width}
    network = timm.create_model(
        name, num_classes=0, norm_layer=norm, zero_init_last=zero_init_last, **options
    )
    assert isinstance(network, ResNet)
    return network


def _conv(in_dim: int, out_dim: int, kernel: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_dim, out_dim, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as timm's others
    return conv


def _init_truncated_normal(weight: Tensor) -> None:
    """Keras' VarianceScaling: normal, cut at two sigma, of variance 1 / fan-in after the cut."""
    sigma = math.sqrt(1 / weight[0].numel()) / _CUT_STD
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def _refuse(name: str, **asked: bool) -> None:
    if changed := [setting for setting, is_asked in asked.items() if is_asked]:
        plain = {"width": "1", "stem": "imagenet", "variant": "timm", "zero_init_last": "true"}
        without = " ".join(f"--set network.{one}={plain.get(one, 'false')}" for one in changed)
        only = f"only {', '.join(RESNETS)} do"
        raise ValueError(f"{name!r} takes no {', '.join(changed)}; {only}: {without}")


def require_known(name: str) -> None:
    """Refuse what timm has no network of; a tag of pretrained weights, too."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see timm.list_models()"
        raise ValueError(f"timm has no network {name!r}; {hint}")
    if "." in name:
        rule = "must be without the tag of pretrained weights, which are not loaded"
        raise ValueError(f"network.name {rule}: {name.partition('.')[0]!r}, got {name!r}")
