"""A faster copy of a frozen network in float16, for CPUs that compute in it."""

from collections import Counter
from copy import deepcopy

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from compressive.checks import full_precision

_LEAST_CHANNELS = 256  # with fewer, the sums of Winograd's algorithm take as long as they save
_IMAGES_AT_ONCE = 128  # activations of more leave the cache of the CPU
_CHECKED = 8  # images whose features are compared with those of the network itself
_LEAST_COSINE = 0.999


class HalfNetwork(nn.Module):
    """A frozen network that computes features with its fused copy, if it has one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: nn.Module = network
        self._copy: list[nn.Module | None] = []  # a list, so that it is not part of the state
        self.eval()

    def forward(self, images: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch feat"]:
        """Return features of normalized images; the first ones decide whether the copy is used."""
        if not self._copy:
            self._copy.append(half_network(self.network, images))
        made = self._copy[0]
        if made is None:
            return self.network(images)
        parts = images.split(_IMAGES_AT_ONCE)
        return torch.cat([half_features(made, some) for some in parts])


def half_network(network: nn.Module, images: Float[Tensor, "batch 3 h w"]) -> nn.Module | None:
    """Return a float16 copy with fused layers; None if its features of `images` differ.

    Batch norm becomes part of the convolutions, and 3 x 3 convolutions of many channels use
    Winograd's algorithm, with 16 instead of 36 products per 2 x 2 pixels.
    """
    images = images[:_CHECKED]
    try:
        with torch.no_grad(), full_precision(images):
            made = _fused(fx.symbolic_trace(deepcopy(network))).eval().half()
            made.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            cosine = F.cosine_similarity(half_features(made, images), network(images).float())
    except Exception:  # a custom network may contain any code, which may be impossible to trace
        return None
    return made if bool((cosine >= _LEAST_COSINE).all()) else None


def half_features(
    made: nn.Module, images: Float[Tensor, "batch 3 h w"]
) -> Float[Tensor, "batch feat"]:
    """Return float32 features of normalized images by the copy that `half_network` returned."""
    with torch.no_grad(), full_precision(images):
        return made(images.half().contiguous(memory_format=torch.channels_last)).float()


class WinogradConv(nn.Module):
    """A 3 x 3 convolution with stride 1 and padding 1: Winograd's F(2 x 2, 3 x 3)."""

    # In float16 it is more exact than the usual algorithm, because fewer products are summed.

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        into = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]).double()
        weight = torch.einsum("ai,bj,ocij->aboc", into, into, conv.weight.double())
        weights = [nn.Parameter(w[..., None, None].float(), False) for w in weight.flatten(0, 1)]
        self.weights: nn.ParameterList = nn.ParameterList(weights)
        self.bias: Tensor | None = conv.bias

    def forward(self, images: Float[Tensor, "batch c h w"]) -> Float[Tensor, "batch out h w"]:
        """Return the convolution of images in channels-last order."""
        height, width = images.shape[2:]
        # Tiles have 4 x 4 pixels and a distance of 2; an odd side gets a pixel more.
        ends = (0, 0, 1, 1 + width % 2, 1, 1 + height % 2)
        padded = F.pad(images.permute(0, 2, 3, 1), ends)
        products = [
            [self._product(tile, 4 * i + j) for j, tile in enumerate(_tiles(part, 2))]
            for i, part in enumerate(_tiles(padded, 1))
        ]
        columns = [_outputs(*column) for column in zip(*products, strict=True)]
        sides = height + height % 2, width + width % 2
        result = images.new_empty(len(images), *sides, len(self.weights[0]))
        for i, row in enumerate(zip(*columns, strict=True)):
            for j, value in enumerate(_outputs(*row)):
                result[:, i::2, j::2] = value
        return result[:, :height, :width].permute(0, 3, 1, 2)

    def _product(self, tile: Tensor, place: int) -> Tensor:
        """Multiply with one of 16 weights; each output contains number 5 once, and so its bias."""
        bias = self.bias if place == 5 else None
        return F.conv2d(tile.permute(0, 3, 1, 2), self.weights[place], bias).permute(0, 2, 3, 1)


def _tiles(pixels: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transform tiles of 4 pixels along an axis."""
    pairs, count = pixels.unfold(axis, 2, 2), pixels.shape[axis] // 2 - 1
    a, c = (pairs[..., 0].narrow(axis, start, count) for start in (0, 1))
    b, d = (pairs[..., 1].narrow(axis, start, count) for start in (0, 1))
    return a - c, b + c, c - b, b - d


def _outputs(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two outputs of a tile of 4 products."""
    return (b + c).add_(a), (b - c).sub_(d)


def _fused(traced: fx.GraphModule) -> fx.GraphModule:
    """Fold batch norms into convolutions, then use Winograd's algorithm where it is faster."""
    modules: dict[str, nn.Module] = dict(traced.named_modules())
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    uses = Counter(str(node.target) for node in calls)
    for node in calls:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1:
            continue
        conv, norm = modules[str(source.target)], modules[str(node.target)]
        is_once = uses[str(source.target)] == 1
        if is_once and isinstance(conv, nn.Conv2d) and type(norm) is nn.BatchNorm2d:
            modules[str(source.target)] = fuse_conv_bn_eval(conv, norm)
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
    for name in uses:
        conv = modules[name]
        if isinstance(conv, nn.Conv2d) and _suits_winograd(conv):
            modules[name] = WinogradConv(conv)
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, modules[name])
    traced.graph.lint()
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced


def _suits_winograd(conv: nn.Conv2d) -> bool:
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    is_plain = shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and conv.padding_mode == "zeros"
    return is_plain and min(conv.in_channels, conv.out_channels) >= _LEAST_CHANNELS
