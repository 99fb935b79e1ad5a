"""The interface of a method: views in, a `Step` with the loss and its statistics out."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import promote_to_float32
from compressive.distributed import mean_value
from compressive.methods.bottleneck import Channel
from compressive.objectives import ResidualTerms


class Step(NamedTuple):
    """Loss and statistics of a batch; only the loss has a gradient.

    Under torch.distributed the loss covers all processes, the rest only this process's images.
    With an adaptive beta the value of the loss excludes the floor of the residual. The floor has no
    gradient, and with it the loss would rise as the betas rise.
    """

    loss: Float[Tensor, ""]
    feats: tuple[Float[Tensor, "batch feat"], ...]  # backbone features of each view
    r: Float[Tensor, "batch dim"]  # normalized projection of the first view
    positive_cosine: Float[Tensor, ""] | None  # mean cosine of the two views' projections
    nll: Float[Tensor, ""]  # mean over images and directions, as all below
    residual: Float[Tensor, ""] | None = None  # nats; compressed methods only
    reducible_residual: Float[Tensor, ""] | None = None  # the part above the floor at equal means
    predictive: Float[Tensor, ""] | None = None  # nats, log K - nll; InfoNCE methods only
    accuracy: Float[Tensor, ""] | None = None  # supervised methods only
    effective_beta: Float[Tensor, ""] | None = None  # weight of the residual, if it is adaptive
    effective_beta_p10: Float[Tensor, ""] | None = None  # its quantiles over images and directions
    effective_beta_p50: Float[Tensor, ""] | None = None
    effective_beta_p90: Float[Tensor, ""] | None = None


class Embeddings(NamedTuple):
    """Embeddings of pairs of views in evaluation mode; rows of X, then rows of Y."""

    r: Float[Tensor, "twice dim"]  # normalized projections
    mu: Float[Tensor, "twice dim"]  # mean direction of e(z|x), or z if not compressed
    mu_b: Float[Tensor, "twice dim"] | None = None  # mean direction of b(z|y), if there is one
    target: Float[Tensor, "twice dim"] | None = None  # InfoNCE methods: the candidates


class Method(nn.Module):
    """Interface that the training loop needs from a method.

    It is a base class and not a Protocol, because torch must register it as a module. It contains
    no shared code: methods share functions.
    """

    encoder: nn.Module  # the backbone, which a run saves
    channel: Channel | None = None  # the bottleneck of a compressed method
    is_supervised: bool = False  # `forward` also takes labels
    view_numbers: tuple[int, ...] = (0, 1)  # views of an image; they key its random numbers

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """Return the loss of the views. Pass a changing `beta` as a tensor, else it recompiles."""
        raise NotImplementedError

    def update_target(self, decay: float) -> None:
        """Update the target network, if there is one, after the optimizer step."""

    def embeddings(self, images: Float[Tensor, "twice channels h w"]) -> Embeddings:
        """Return the embeddings of views X, then Y; call it in evaluation mode."""
        raise NotImplementedError

    def bound(self, batch: int) -> float | None:
        """Return log K, the upper limit of the predictive information, or None."""
        return None

    def predictive(
        self, z: Float[Tensor, "twice dim"], target: Float[Tensor, "twice dim"]
    ) -> Float[Tensor, " batch"] | None:
        """Return the predictive information of z per image in nats, or None."""
        return None


def make_step(
    loss: Tensor,
    feats: Sequence[Tensor],
    r: Sequence[Tensor],
    nll: Sequence[Tensor],
    residuals: Sequence[ResidualTerms] = (),
    bound: float | None = None,
    betas: Sequence[float | Tensor] = (),
) -> Step:
    """Build a `Step` from per-image values, one sequence entry per view or direction.

    `betas` are the arguments of `compress`. Only adaptive ones, one value per image, are reported.
    """
    mu_x, mu_y = (direction(each.detach()) for each in r)
    nll_mean = _mean(nll)
    adaptive = [each for each in betas if isinstance(each, Tensor) and each.dim()]
    if adaptive:
        floors = torch.stack([each.residual - each.reducible for each in residuals]).detach()
        loss = loss - mean_value((torch.stack(adaptive) * floors).sum(0).mean())
    return Step(
        loss=loss,
        feats=tuple(each.detach() for each in feats),
        r=mu_x,
        positive_cosine=(mu_x * mu_y).sum(-1).mean(),
        nll=nll_mean,
        residual=_mean([each.residual for each in residuals]) if residuals else None,
        reducible_residual=_mean([each.reducible for each in residuals]) if residuals else None,
        predictive=None if bound is None else bound - nll_mean,
        **_effective_beta(adaptive),
    )


def direction(r: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """Normalize projections in float32 or wider."""
    return F.normalize(promote_to_float32("a projection", r), dim=-1)


def _mean(directions: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(directions)).detach().mean()


def _effective_beta(betas: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the mean and quantiles of beta over images, without waiting for the device."""
    if not betas:
        return {}
    ordered = torch.cat(tuple(betas)).detach().sort().values
    last = len(ordered) - 1
    quantiles = {f"effective_beta_p{q}": ordered[round(last * q / 100)] for q in (10, 50, 90)}
    return {"effective_beta": ordered.mean(), **quantiles}


def exchange(rows: Float[Tensor, "twice dim"]) -> Float[Tensor, "twice dim"]:
    """Return the rows of Y, then those of X."""
    return torch.cat(rows.chunk(2)[::-1])
