"""The eight color changes of the paper's smoothness measurement (App. G)."""

from collections.abc import Callable
from typing import NamedTuple

from compressive.augment import ops
from compressive.augment.ops import Images
from compressive.augment.params import Numbers


class Perturbation(NamedTuple):
    """One color change, as strong as the strongest in training."""

    name: str
    operator: Callable[[Images, Numbers], Images]
    amount: float  # added to brightness and hue; factor of contrast and saturation


PERTURBATIONS = (  # paper, table of augmentations: 0.4, 0.4, 0.2, 0.1
    Perturbation("brightness+", ops.brightness, 0.4),
    Perturbation("brightness-", ops.brightness, -0.4),
    Perturbation("contrast+", ops.contrast, 1.4),
    Perturbation("contrast-", ops.contrast, 0.6),
    Perturbation("saturation+", ops.saturation, 1.2),
    Perturbation("saturation-", ops.saturation, 0.8),
    Perturbation("hue+", ops.hue, 0.1),
    Perturbation("hue-", ops.hue, -0.1),
)


def perturb(images: Images, perturbation: Perturbation) -> Images:
    """Change the color of images in [0, 1] and clip to [0, 1]."""
    amount = images.new_full((len(images),), perturbation.amount)
    return perturbation.operator(images, amount).clamp(0, 1)
