"""The paper's augmentations: crops, color changes, blur, solarization; in batch on the device.

Images are (batch, 3, h, w) floats in [0, 1] unless stated otherwise. `params` draws the random
parameters of each image. Here they are tensors, so that nothing loops over images and one graph
holds everything.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from compressive.augment.params import Box, Draw, Flags, Jitter, Numbers, View, draw, draw_pair
from compressive.checks import full_precision, validates_inputs
from compressive.platforms.float64 import to_float64
from compressive.rng import Integers, Keys

Images = Float[Tensor, "batch 3 h w"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class Channels(NamedTuple):
    """Mean and standard deviation of the colors, for the normalization."""

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


IMAGENET_COLORS = Channels()


def brightness(images: Images, delta: Numbers) -> Images:
    """Add `delta` to all channels without clipping."""
    return images + delta[:, None, None, None]


def contrast(images: Images, factor: Numbers) -> Images:
    """Multiply the differences to each channel's mean without clipping."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + factor[:, None, None, None] * (images - mean)


def saturation(images: Images, factor: Numbers) -> Images:
    """Multiply the HSV saturation, up to 1."""
    return torch.stack(_hsv(images.unbind(1), factor, torch.zeros_like(factor)), 1)


def hue(images: Images, turn: Numbers) -> Images:
    """Rotate the HSV hue; `turn` is in turns of the color circle."""
    return torch.stack(_hsv(images.unbind(1), torch.ones_like(turn), turn), 1)


def grayscale(images: Images) -> Images:
    """Return the luminance in all three channels."""
    return _gray(images.unbind(1))[:, None].expand_as(images)


def solarize(images: Images) -> Images:
    """Invert values of 0.5 and more."""
    return torch.where(images < 0.5, images, 1 - images)


def jitter(images: Images, change: Jitter) -> Images:
    """Apply the four color operations in the order drawn per image; clip to [0, 1] after each."""
    return torch.stack(_jitter(images.unbind(1), change), 1)


def _gray(planes: Sequence[Tensor]) -> Tensor:
    return 0.2989 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2]


def _hsv(planes: Sequence[Tensor], factor: Tensor, turn: Tensor) -> list[Tensor]:
    """Change saturation and hue at once; neither affects the other."""
    red, green, blue = planes
    value = red.maximum(green).maximum(blue)
    chroma = value - red.minimum(green).minimum(blue)
    is_red, is_green = red == value, green == value
    side = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    sixth = torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0))
    sixth = sixth + side / chroma.clamp(min=1e-30) + 6 * turn[:, None, None]
    sixth = sixth - 6 * (sixth / 6).floor()
    chroma = (chroma * factor[:, None, None]).minimum(value)
    lacks = (2 - (sixth - 3).abs(), (sixth - 2).abs() - 1, (sixth - 4).abs() - 1)
    return [value - chroma * lack.clamp(0, 1) for lack in lacks]


def _jitter(planes: Sequence[Tensor], change: Jitter) -> list[Tensor]:
    """Apply hsv, brightness or contrast, hsv, the other one, hsv; some of them do nothing."""
    # This covers every order: saturation and hue commute, so only the number of brightness and
    # contrast operations before each of them matters. The mean for contrast is computed once, from
    # the input of the contrast operation.
    light, stretch, *late = change.turns.unbind(1)
    first = light < stretch
    stages = [(turn > light).long() + (turn > stretch) for turn in late]

    def hsv(planes: Sequence[Tensor], stage: int, on: Tensor | bool = True) -> list[Tensor]:
        factor = torch.where((stages[0] == stage) & on, change.saturation, 1.0)
        return _hsv(planes, factor, torch.where((stages[1] == stage) & on, change.hue, 0.0))

    def affine(planes: Sequence[Tensor], on: Tensor) -> list[Tensor]:
        delta = torch.where(on, change.brightness, 0.0)[:, None, None]
        factor = torch.where(on, 1.0, change.contrast)[:, None, None]
        pairs = zip(planes, means, strict=True)
        return [(mean + factor * (p - mean) + delta).clamp(0, 1) for p, mean in pairs]

    planes = hsv(planes, 0)
    delta = torch.where(first, change.brightness, 0.0)[:, None, None]
    seen = hsv([(p + delta).clamp(0, 1) for p in planes], 1, first)
    means = [p.mean((1, 2), keepdim=True) for p in seen]
    return hsv(affine(hsv(affine(planes, first), 1), ~first), 2)


def _products(images: Tensor, down: Tensor, across: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows and columns of each image by its matrices, (batch, out, in), in `dtype`."""
    # In memory the channels are between rows and columns, so that both products are batched.
    rows = images.transpose(1, 2).contiguous().to(dtype).flatten(1, 2)
    rows = (rows @ across.mT.to(dtype)).unflatten(1, (-1, 3)).flatten(2)
    return (down.to(dtype) @ rows).unflatten(2, (3, -1)).transpose(1, 2)


def gaussian_blur(
    images: Images, sigma: Numbers, taps: int, products: torch.dtype = torch.float32
) -> Images:
    """Blur with standard deviation `sigma` in pixels, zero padding; sigma 0 changes nothing."""

    def band(side: int) -> Tensor:
        at = torch.arange(side, device=images.device)
        apart = (at[:, None] - at).float()
        return torch.where(apart.abs() <= taps // 2, bell(apart), 0.0) / total

    def bell(apart: Tensor) -> Tensor:
        # Below a sigma of 0.07 the neighbors' weights are 0 in float32: 0.01 is the identity.
        return torch.exp(-0.5 * (apart / sigma.clamp(min=0.01)[:, None, None]) ** 2)

    total = bell(torch.arange(-(taps // 2), taps // 2 + 1, device=images.device)).sum(2, True)
    return _products(images, band(images.shape[2]), band(images.shape[3]), products).float()


def crop_resize_flip(
    images: UInt8[Tensor, "batch 3 h w"] | Images,
    box: Box,
    flip: Flags,
    size: int,
    *,
    antialias: bool = False,
    products: torch.dtype = torch.float32,
) -> Float[Tensor, "batch 3 size size"]:
    """Return the box of each image at size x size, mirrored where `flip`; uint8 becomes [0, 1]."""
    # Bicubic with Keys' a = -0.5, half-pixel centers, weights normalized within the box; clipped.
    # TensorFlow rounds positions to 1/1024 pixel (1.3e-4 in the result). Here they are exact, as
    # are their differences to the pixels: whole numbers over 2 * size.

    def weights(start: Tensor, length: Tensor, source: int, flip: Tensor | None) -> Tensor:
        to = torch.arange(size, device=images.device)[None]
        if flip is not None:
            to = torch.where(flip[:, None], size - 1 - to, to)
        pixel = torch.arange(source, device=images.device) - start[:, None]
        center = ((2 * to + 1) * length[:, None] - size).float()
        unit = length[:, None, None].clamp(min=size) if antialias else size
        d = (center[:, :, None] - (2 * size * pixel).float()[:, None]).abs() / (2 * unit)
        near, far = (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
        weight = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
        inside = (pixel >= 0) & (pixel < length[:, None])
        weight = weight * inside[:, None]
        return weight / weight.sum(2, keepdim=True)

    down = weights(box.top, box.height, images.shape[2], None)
    across = weights(box.left, box.width, images.shape[3], flip)
    scale = 1 if images.is_floating_point() else 1 / 255
    return (_products(images, down, across, products).float() * scale).clamp(0, 1)


def center_box(height: Integers, width: Integers, share: float = 0.875) -> Box:
    """Return the centered square for evaluation; its side is `share` of the shorter side."""
    side = (share * to_float64(height.minimum(width))).round().long().to(height.device)
    return Box((height - side + 1) // 2, (width - side + 1) // 2, side, side)


def central_share(size: int) -> float:
    """Return the share of the shorter side that evaluation crops; 1 up to 32 pixels (CIFAR)."""
    return 1.0 if size <= 32 else 0.875


@validates_inputs
def center_crop(
    images: UInt8[Tensor, "batch ..."],
    size: int,
    *,
    height: Integers | None = None,
    width: Integers | None = None,
    antialias: bool = False,
) -> Float[Tensor, "batch 3 size size"]:
    """Return the center crop for evaluation, not normalized; arguments as in `augment`."""
    images = planar(images)
    full = images.new_ones(len(images), dtype=torch.long)
    height = full * images.shape[2] if height is None else height
    width = full * images.shape[3] if width is None else width
    box = center_box(height, width, central_share(size))
    with full_precision(images):
        return crop_resize_flip(images, box, full < 0, size, antialias=antialias)


def normalize(
    images: Images,
    dtype: torch.dtype = torch.float32,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Images:
    """Subtract the mean and divide by the standard deviation; the result is channels_last."""
    channel = torch.arange(3, device=images.device)[:, None, None]

    def spread(values: Sequence[float]) -> Tensor:
        # A tensor from the host would synchronize with the device.
        rest = torch.where(channel == 1, values[1], values[2])
        return torch.where(channel == 0, values[0], rest)

    images = (images - spread(mean)) / spread(std)
    return images.to(dtype, memory_format=torch.channels_last)


def colors(normalized: Images, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Images:
    """Invert `normalize`: return colors from 0 to 1."""
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return normalize(normalized.float(), mean=shift, std=[1 / s for s in std])


@validates_inputs
def augment(
    images: UInt8[Tensor, "batch ..."],
    keys: Keys,
    view: View,
    size: int,
    *,
    height: Integers | None = None,
    width: Integers | None = None,
    dtype: torch.dtype = torch.float32,
    products: torch.dtype = torch.float32,
) -> Float[Tensor, "batch 3 size size"]:
    """Make one random view of each uint8 image, (batch, 3, h, w) or (batch, h, w, 3), normalized.

    Images of different sizes are in the top left corners of the batch; `height` and `width` are
    their sizes. `products` is the dtype of the matrix products and of the images between them:
    float16 is faster on a GPU, with errors of about 1e-3 of the range. Colors are always float32.
    """
    images = planar(images)
    if keys.shape != (len(images), 2) or keys.device != images.device:
        needed = f"({len(images)}, 2) on {images.device}, as made by image_keys"
        raise ValueError(f"keys must be {needed}, got {tuple(keys.shape)} on {keys.device}")
    if size < 1:
        raise ValueError(f"size must be 1 or more, got {size}")
    if height is None or width is None:
        drawn = draw(keys, view, *images.shape[2:])
    else:
        drawn = draw(keys, view, height, width)
        zero = torch.zeros_like(height)
        drawn = drawn._replace(box=drawn.box or Box(zero, zero, height, width))
    with full_precision(images):
        views = render(images, drawn, size, antialias=view.antialias, products=products)
        return normalize(views, dtype)


@validates_inputs
def augment_pair(
    images: UInt8[Tensor, "batch 3 h w"],
    keys: Int[Tensor, "twice 2"],
    views: tuple[View, View],
    size: int,
    *,
    height: Integers,
    width: Integers,
    dtype: torch.dtype = torch.float32,
    products: torch.dtype = torch.float32,
    channels: Channels = IMAGENET_COLORS,
) -> tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 3 size size"]]:
    """Make two views as `augment` does; `keys` are those of all first views, then all second."""
    if views[0].antialias != views[1].antialias:
        raise ValueError("antialias must be equal in both views")
    if len(keys) != 2 * len(images):
        raise ValueError(
            f"keys must have two rows for each of {len(images)} images, got {len(keys)}"
        )
    drawn = draw_pair(keys, views, height, width)
    both = torch.cat([images, images])
    with full_precision(images):
        made = render(both, drawn, size, antialias=views[0].antialias, products=products)
        x, y = normalize(made, dtype, *channels).chunk(2)
        return x, y


def render(
    images: UInt8[Tensor, "batch 3 h w"],
    drawn: Draw,
    size: int,
    *,
    antialias: bool = False,
    products: torch.dtype = torch.float32,
) -> Float[Tensor, "batch 3 size size"]:
    """Apply parameters that are already drawn; return views in [0, 1], not normalized."""
    box, flip, height, width = drawn.box, drawn.flip, *images.shape[2:]
    if box is None and height == width == size:
        x = torch.where(flip[:, None, None, None], images.flip(3), images) / 255
    else:
        zero = torch.zeros_like(flip, dtype=torch.long)
        box = box or Box(zero, zero, zero + height, zero + width)
        x = crop_resize_flip(images, box, flip, size, antialias=antialias, products=products)
    planes = x.unbind(1)
    if drawn.jitter is not None:
        planes = _jitter(planes, drawn.jitter)
    if drawn.gray is not None:
        gray, luma = drawn.gray[:, None, None], _gray(planes)
        planes = [torch.where(gray, luma, plane) for plane in planes]
    x = torch.stack([plane.to(products) for plane in planes], 2).transpose(1, 2)
    if drawn.sigma is not None:
        x = gaussian_blur(x, drawn.sigma, blur_taps(size), products)
    x = x.float().clamp(0, 1)
    if drawn.solarize is not None:
        x = torch.where(drawn.solarize[:, None, None, None], solarize(x), x)
    return x


def blur_taps(size: int) -> int:
    """Return the width of the blur kernel for this view size: 23 at 224 pixels, 3 at 32."""
    return 2 * (size // 10 // 2) + 1


def planar(images: Tensor) -> UInt8[Tensor, "batch 3 h w"]:
    """Return uint8 images with the channels first; accept channels first or last."""
    if images.dtype != torch.uint8 or images.ndim != 4 or 3 not in (images.shape[1::2]):
        rule = "images must be uint8 of shape (batch, 3, h, w) or (batch, h, w, 3)"
        raise ValueError(f"{rule}, got {images.dtype} of shape {tuple(images.shape)}")
    return images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
