"""Settings of a view; random parameters of each image as functions of its key alone."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compressive.rng import Integers, Keys, uniforms

Numbers = Float[Tensor, " batch"]
Flags = Bool[Tensor, " batch"]


@dataclass(frozen=True, kw_only=True)
class View:
    """Settings of one view, in the order of its operations; defaults are the paper's t."""

    crop: bool = True  # False if images are already cropped
    crop_scale_min: float = 0.08  # fraction of the image's area
    crop_scale_max: float = 1.0
    log_aspect: bool = True  # log(w/h) is uniform from log 3/4 to log 4/3; False: w/h is uniform
    antialias: bool = False  # the official code never antialiases, even when it shrinks
    flip: float = 0.5  # flip, jitter, gray, blur and solarize are probabilities
    jitter: float = 0.8
    brightness: float = 0.4  # these four are maximum changes; their order is random
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1  # in turns of the color circle
    gray: float = 0.2
    blur: float = 1.0
    sigma_min: float = 0.1  # in pixels of the view
    sigma_max: float = 2.0
    solarize: float = 0.0

    def __post_init__(self) -> None:
        most = dict.fromkeys(("flip", "jitter", "gray", "blur", "solarize"), 1.0)
        most |= {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.5}
        for name, high in most.items():
            if not 0 <= (value := getattr(self, name)) <= high:
                raise ValueError(f"view.{name} must be from 0 to {high}, got {value}")
        for name, high in (("crop_scale", 1.0), ("sigma", 1e6)):
            low, top = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not 0 < low <= top <= high:
                rule = f"0 < view.{name}_min <= view.{name}_max <= {high:g}"
                raise ValueError(f"{rule} must hold, got {low} and {top}")


def paper_views(crop_scale_min: float = 0.08) -> tuple[View, View]:
    """Return the paper's t and t' (BYOL's); they differ only in blur and solarization."""
    t = View(crop_scale_min=crop_scale_min)
    return t, replace(t, blur=0.1, solarize=0.2)


def simclr_views(strength: float = 1.0) -> tuple[View, View]:
    """Return SimCLR's two views, which are equal; `strength` scales the color distortion."""
    # The probability of blur is that of SimCLR's code, 0.5; the paper's table says 1.0.
    s = 0.8 * strength
    view = View(
        log_aspect=False, brightness=s, contrast=s, saturation=s, hue=0.2 * strength, blur=0.5
    )
    return view, view


def crop_views() -> tuple[View, View]:
    """Return two equal views: a random crop and a flip, as in linear evaluation and fine-tuning."""
    view = View(jitter=0.0, gray=0.0, blur=0.0)
    return view, view


class Box(NamedTuple):
    """A rectangle in each image, in whole pixels."""

    top: Integers
    left: Integers
    height: Integers
    width: Integers


class Jitter(NamedTuple):
    """Color changes; `turns` holds the position of each of the four in the order, 0 to 3."""

    turns: Int[Tensor, "batch 4"]
    brightness: Numbers
    contrast: Numbers
    saturation: Numbers
    hue: Numbers


class Draw(NamedTuple):
    """Random parameters of each image; None turns an operation off for all images."""

    box: Box | None  # None: the whole image
    flip: Flags
    jitter: Jitter | None
    gray: Flags | None
    sigma: Numbers | None  # 0: no blur
    solarize: Flags | None


def crop_box(
    u: Float[Tensor, "batch 4"], view: View, height: int | Integers, width: int | Integers
) -> Box:
    """Return a random crop from four uniform numbers: area, aspect, vertical, horizontal place."""
    # One draw as in the official code: sides are rounded half to even and clipped to the image.
    area, aspect, down, across = u.unbind(1)
    area = _between(area, view.crop_scale_min, view.crop_scale_max) * height * width
    if view.log_aspect:
        aspect = _between(aspect, math.log(3 / 4), math.log(4 / 3)).exp()
    else:
        aspect = _between(aspect, 3 / 4, 4 / 3)
    h = (area / aspect).sqrt().round().clamp(min=1).minimum(torch.zeros_like(area) + height)
    w = (area * aspect).sqrt().round().clamp(min=1).minimum(torch.zeros_like(area) + width)
    box = (down * (height - h + 1)).floor(), (across * (width - w + 1)).floor(), h, w
    return Box(*(side.long() for side in box))


def draw(keys: Keys, view: View, height: int | Integers, width: int | Integers) -> Draw:
    """Draw all random parameters of a view, in float64 so that devices agree in float32."""
    u = uniforms(keys, 18)
    drawn = _draw_from_uniforms(u, view, *(_to_device(side, u.device) for side in (height, width)))
    return _to_device(drawn, keys.device)


def draw_pair(
    keys: Int[Tensor, "twice 2"], views: tuple[View, View], height: Integers, width: Integers
) -> Draw:
    """Return what two calls of `draw` with halves of `keys` return, in half the operations."""
    u = uniforms(keys, 18)
    height, width = height.to(u.device), width.to(u.device)
    first, second = (
        _draw_from_uniforms(each, v, height, width)
        for each, v in zip(u.chunk(2), views, strict=True)
    )
    zero = torch.zeros_like(height)
    still = Jitter(torch.arange(4, device=zero.device).expand(len(zero), 4), *[zero.float()] * 4)
    still = still._replace(contrast=zero + 1.0, saturation=zero + 1.0)
    whole = Box(zero, zero, height, width)
    drawn = Draw(
        _concatenate(first.box or whole, second.box or whole),
        torch.cat([first.flip, second.flip]),
        _concatenate(first.jitter or still, second.jitter or still),
        _either(first.gray, second.gray, zero > 0),
        _either(first.sigma, second.sigma, zero.float()),
        _either(first.solarize, second.solarize, zero > 0),
    )
    return _to_device(drawn, keys.device)


def _to_device(drawn: Any, device: torch.device) -> Any:
    """Move a tensor or the tensors of a nested tuple; keep numbers and None."""
    if isinstance(drawn, tuple):
        return type(drawn)(*(_to_device(each, device) for each in drawn))
    return drawn.to(device) if isinstance(drawn, Tensor) else drawn


def _concatenate(first: Any, second: Any) -> Any:
    return type(first)(*(torch.cat(pair) for pair in zip(first, second, strict=True)))


def _either(first: Tensor | None, second: Tensor | None, none: Tensor) -> Tensor | None:
    """Concatenate, with `none` in place of a missing one; return None if both are missing."""
    if first is None and second is None:
        return None
    return torch.cat([none if first is None else first, none if second is None else second])


def _draw_from_uniforms(
    u: Float[Tensor, "batch 18"], view: View, height: int | Integers, width: int | Integers
) -> Draw:
    flip, jitters, *changes = u[:, 4:10].unbind(1)
    gray, blurs, sigma, solarize = u[:, 14:].unbind(1)
    strengths = (view.brightness, view.contrast, view.saturation, view.hue)
    changed = [
        torch.where(jitters < view.jitter, _between(v, same - most, same + most), same).float()
        for v, most, same in zip(changes, strengths, (0.0, 1.0, 1.0, 0.0), strict=True)
    ]
    # The ranks of four numbers are a random permutation. In a tie (1e-9) the first has rank 0.
    lots = u[:, 10:14] + 2.0**-40 * torch.arange(4, device=u.device)
    turns = (lots[:, None, :] < lots[:, :, None]).sum(2)
    sigma = torch.where(blurs < view.blur, _between(sigma, view.sigma_min, view.sigma_max), 0.0)
    return Draw(
        crop_box(u[:, :4], view, height, width) if view.crop else None,
        flip < view.flip,
        Jitter(turns, *changed) if view.jitter > 0 else None,
        gray < view.gray if view.gray > 0 else None,
        sigma.float() if view.blur > 0 else None,
        solarize < view.solarize if view.solarize > 0 else None,
    )


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * u
