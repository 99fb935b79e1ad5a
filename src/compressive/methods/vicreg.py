"""VICReg (Bardes et al., 2022): invariance, variance and covariance terms, no negatives."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import (
    check_nonnegative,
    check_same_shape_2d,
    full_precision,
    validates_inputs,
)
from compressive.config import Config
from compressive.distributed import gather
from compressive.methods.parts import build_online
from compressive.methods.step import Embeddings, Method, Step, direction, make_step

# Published coefficients (sec. 4.2): lambda, mu and nu. EPSILON and the target deviation of 1 are
# those of eq. 1 and 2.
INVARIANCE, VARIANCE, COVARIANCE = 25.0, 25.0, 1.0
EPSILON = 1e-4


class VICRegLoss(NamedTuple):
    """VICReg's loss and its three terms, not yet weighted."""

    loss: Float[Tensor, ""]
    invariance: Float[Tensor, " batch"]  # mean squared difference of the two embeddings, per image
    variance: Float[Tensor, ""]  # hinge on the standard deviation, mean of both views
    covariance: Float[Tensor, ""]  # squared off-diagonal covariances over dim, sum of both views


@validates_inputs
def vicreg_loss(
    z_x: Float[Tensor, "batch dim"],
    z_y: Float[Tensor, "batch dim"],
    *,
    invariance: float = INVARIANCE,
    variance: float = VARIANCE,
    covariance: float = COVARIANCE,
) -> VICRegLoss:
    """Return VICReg's loss (eq. 6) with the scaling of the official code.

    The official code averages the variance term over the two views and sums the covariance term;
    its invariance term is the mean over all elements. Under torch.distributed the statistics are
    those of all processes.
    """
    z_x, z_y = check_same_shape_2d(z_x=z_x, z_y=z_y)
    check_nonnegative(invariance=invariance, variance=variance, covariance=covariance)
    with full_precision(z_x):
        z_x, z_y = gather(torch.cat([z_x, z_y], dim=-1)).chunk(2, dim=-1)
        apart = (z_x - z_y).square().mean(1)
        spread = (_hinge(z_x) + _hinge(z_y)) / 2
        shared = _off_diagonal(z_x) + _off_diagonal(z_y)
        loss = invariance * apart.mean() + variance * spread + covariance * shared
        return VICRegLoss(loss, apart, spread, shared)


def _hinge(z: Tensor) -> Tensor:
    """Return the mean over dimensions of max(0, 1 - standard deviation)."""
    return F.relu(1 - (z.var(0) + EPSILON).sqrt()).mean()


def _off_diagonal(z: Tensor) -> Tensor:
    """Return the sum of squared covariances between different dimensions, over dim."""
    count, dim = z.shape
    centered = z - z.mean(0)
    covariance = centered.T @ centered / (count - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / dim


class VICReg(Method):
    """VICReg; the projection is what the paper calls the expander."""

    projection: nn.Module

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """Return the loss of two views; `beta` is unused. Each view has its own forward pass."""
        feats = [self.encoder(view) for view in views]
        r = [self.projection(each) for each in feats]
        found = vicreg_loss(*r)
        return make_step(found.loss, feats, r, [found.invariance])

    def embeddings(self, images: Float[Tensor, "twice channels h w"]) -> Embeddings:
        """Return the directions of the embeddings of views X, then Y."""
        mu = direction(self.projection(self.encoder(images)))
        return Embeddings(mu, mu)


def build(config: Config, *, biased_variance: bool = False) -> VICReg:
    """Build VICReg with the published coefficients."""
    return VICReg(*build_online(config, biased_variance=biased_variance))
