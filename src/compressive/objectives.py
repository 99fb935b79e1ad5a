"""Losses: SimCLR and BYOL, plain and compressed by the Conditional Entropy Bottleneck.

X and Y are two views of an image, r_x and r_y their projections, and Z a sample of the encoder
e(z|x) = vMF(r_x / |r_x|, kappa_e). Beta weights the information that Z keeps of X and that Y cannot
predict, I(X;Z|Y) <= E[log e(z|x) - log b(z|y)], against the information that Z has about Y. All
values are in nats, one per image, and summed over both directions (X and Y exchanged) as in the
official code. Other libraries average the directions.

Under torch.distributed the candidates of all processes are gathered with gradient. Every process
must have the same number of images; drop the last, smaller batch.
"""

from contextlib import nullcontext
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributions import kl_divergence

from compressive.checks import (
    check_beta,
    check_nonnegative,
    check_one_of,
    check_positive,
    check_same_device,
    check_same_shape_2d,
    check_unit_rows,
    full_precision,
    validates_inputs,
)
from compressive.distributed import gather, mean_value, rank, world_size
from compressive.distributions.vmf import VonMisesFisher
from compressive.info_nce import (
    both_directions,
    candidate_nll,
    chunk_rows,
    chunked_nll,
    info_nce,
    log_candidates,
)

__all__ = [
    "ADAPTIVE_WEIGHTS",
    "RESIDUAL_ESTIMATORS",
    "AdaptiveWeight",
    "BYOLLoss",
    "CBYOLLoss",
    "CSimCLRLoss",
    "ResidualEstimator",
    "ResidualTerms",
    "SimCLRLoss",
    "byol_loss",
    "cbyol_loss",
    "cbyol_terms",
    "compress",
    "csimclr_loss",
    "distributed_rsample",
    "expected_residual_information",
    "image_beta",
    "info_nce",
    "residual_information",
    "residual_terms",
    "simclr_loss",
]

ResidualEstimator = Literal["sampled", "analytic"]
RESIDUAL_ESTIMATORS = get_args(ResidualEstimator)
AdaptiveWeight = Literal["likelihood", "rank"]
ADAPTIVE_WEIGHTS = get_args(AdaptiveWeight)


class SimCLRLoss(NamedTuple):
    """SimCLR's loss and bounds on the information of the views; per image unless noted."""

    loss: Float[Tensor, ""]  # mean over images, sum over directions
    nll_x: Float[Tensor, " batch"]  # -log of the probability of Y among the candidates, given X
    nll_y: Float[Tensor, " batch"]
    predictive_x: Float[Tensor, " batch"]  # bound on I(Y;Z), Z the direction of X: log K - nll
    predictive_y: Float[Tensor, " batch"]  # bound on I(X;Z), Z the direction of Y
    bound: float  # log K, the upper limit of both estimates


class CSimCLRLoss(NamedTuple):
    """C-SimCLR's loss and the information meter, in nats; per image unless noted."""

    loss: Float[Tensor, ""]  # mean of beta * residual - predictive, sum over directions
    nll_x: Float[Tensor, " batch"]
    nll_y: Float[Tensor, " batch"]
    residual_x: Float[Tensor, " batch"]  # I(X;Z|Y): kept of X alone
    residual_y: Float[Tensor, " batch"]  # I(Y;Z|X), Z drawn from e(z|y)
    predictive_x: Float[Tensor, " batch"]  # I(Y;Z): kept of X and shared with Y
    predictive_y: Float[Tensor, " batch"]  # I(X;Z)
    bound: float  # log K, the upper limit of predictive
    entropy_e: Float[Tensor, " batch"]  # H(e(z|x))
    entropy_b: Float[Tensor, " batch"]  # -E log b(z|y) = entropy_e + residual_x
    reducible_residual: Float[
        Tensor, " batch"
    ]  # the part of the residual above its floor at equal means
    beta_x: float | Tensor  # weight of residual_x; one value per image if it is adaptive
    beta_y: float | Tensor


class BYOLLoss(NamedTuple):
    """BYOL's loss, one direction."""

    loss: Float[Tensor, ""]
    nll: Float[Tensor, " batch"]  # -log d(y'|z) up to a constant, d = vMF(y_hat, 2 weight)


class CBYOLLoss(NamedTuple):
    """C-BYOL's loss and the information meter in nats, one direction; per image unless noted.

    There is no `predictive`: BYOL's decoder bounds I(Y';Z) only up to the unknown entropy of Y'.
    """

    loss: Float[Tensor, ""]  # mean of nll + beta * residual
    nll: Float[Tensor, " batch"]
    residual: Float[Tensor, " batch"]  # I(X;Z|Y)
    entropy_e: Float[Tensor, " batch"]
    entropy_b: Float[Tensor, " batch"]
    reducible_residual: Float[Tensor, " batch"]
    beta: float | Tensor  # weight of the residual; one value per image if it is adaptive


@validates_inputs
def simclr_loss(
    r_x: Float[Tensor, "batch dim"],
    r_y: Float[Tensor, "batch dim"],
    *,
    temperature: float = 0.1,
    own_view_negatives: bool = True,
    gather_chunk: int | None = None,
) -> SimCLRLoss:
    """Return SimCLR's loss (NT-Xent): find the other view among the views of other images.

    `own_view_negatives` adds the other images of the same view to the candidates, so that
    K = 2B - 1 instead of B, as in SimCLR. `gather_chunk` limits memory: see docs/large-batches.md.
    """
    r_x, r_y = check_same_shape_2d(r_x=r_x, r_y=r_y)
    check_positive(temperature=temperature)
    with full_precision(r_x):
        mu_x, mu_y = F.normalize(r_x, dim=-1), F.normalize(r_y, dim=-1)
        nll_x, nll_y, bound = _both_ways(
            mu_x, mu_y, mu_x, mu_y, 1 / temperature, own_view_negatives, gather_chunk
        )
        loss = mean_value((nll_x + nll_y).mean())
        return SimCLRLoss(loss, nll_x, nll_y, bound - nll_x, bound - nll_y, bound)


@validates_inputs
def csimclr_loss(
    r_x: Float[Tensor, "batch dim"],
    r_y: Float[Tensor, "batch dim"],
    *,
    kappa_e: float = 1024.0,
    kappa_b: float = 10.0,
    beta: float | Float[Tensor, ""] = 1.0,
    z_x: Float[Tensor, "batch dim"] | None = None,
    z_y: Float[Tensor, "batch dim"] | None = None,
    own_view_negatives: bool = True,
    residual_estimator: ResidualEstimator = "sampled",
    adaptive_weight: AdaptiveWeight | None = None,
    gather_chunk: int | None = None,
) -> CSimCLRLoss:
    """Return beta [I(X;Z|Y) + I(Y;Z|X)] - [I(Y;Z) + I(X;Z)], each as a variational bound.

    At beta = 0 and z at its mode this is simclr_loss at temperature 1 / kappa_b, minus the
    constant 2 log K. `z_x`, `z_y` default to samples of e(z|x), e(z|y).
    `residual_estimator="analytic"` replaces the sampled log ratio by its expectation over z, a KL
    divergence: the same loss on average with about a third of the gradient noise (0.36 at
    kappa_e = 1024). `adaptive_weight` gives each image and direction its own beta: see
    `image_beta`. `gather_chunk` limits memory: see docs/large-batches.md.
    """
    r_x, r_y = check_same_shape_2d(r_x=r_x, r_y=r_y)
    check_nonnegative(kappa_e=kappa_e, kappa_b=kappa_b)
    check_beta(beta)
    check_one_of(RESIDUAL_ESTIMATORS, residual_estimator=residual_estimator)
    with full_precision(r_x):
        mu_x, mu_y = F.normalize(r_x, dim=-1), F.normalize(r_y, dim=-1)
        e_x, e_y = _vmf(mu_x, kappa_e), _vmf(mu_y, kappa_e)
        b_x, b_y = _vmf(mu_x, kappa_b), _vmf(mu_y, kappa_b)
        drawn_x, drawn_y = z_x is None, z_y is None
        z_x = distributed_rsample(e_x) if z_x is None else check_unit_rows("r_x", r_x, "z_x", z_x)
        z_y = distributed_rsample(e_y) if z_y is None else check_unit_rows("r_y", r_y, "z_y", z_y)
        nll_x, nll_y, bound = _both_ways(
            z_x, z_y, mu_x, mu_y, kappa_b, own_view_negatives, gather_chunk
        )
        x = residual_terms(z_x, e_x, b_y, residual_estimator, drawn_x)
        y = residual_terms(z_y, e_y, b_x, residual_estimator, drawn_y)
        beta_x = image_beta(beta, nll_x, adaptive_weight)
        beta_y = image_beta(beta, nll_y, adaptive_weight)
        total = compress(nll_x, x.residual, beta_x) + compress(nll_y, y.residual, beta_y)
        return CSimCLRLoss(
            loss=mean_value(total.mean() - 2 * bound),
            nll_x=nll_x,
            nll_y=nll_y,
            residual_x=x.residual,
            residual_y=y.residual,
            predictive_x=bound - nll_x,
            predictive_y=bound - nll_y,
            bound=bound,
            entropy_e=x.entropy,
            entropy_b=x.entropy + x.residual,
            reducible_residual=x.reducible,
            beta_x=beta_x,
            beta_y=beta_y,
        )


@validates_inputs
def byol_loss(
    prediction: Float[Tensor, "batch dim"],
    target: Float[Tensor, "batch dim"],
    *,
    weight: float = 1.0,
) -> BYOLLoss:
    """Return BYOL's loss, weight (2 - 2 cos) between prediction and target, of one direction.

    It is -log of a vMF decoder of concentration kappa_d = 2 weight, up to a constant. The target
    is not detached here; detach it if its network must get no gradient.
    """
    prediction, target = check_same_shape_2d(prediction=prediction, target=target)
    check_nonnegative(weight=weight)
    with full_precision(prediction):
        nll = weight * _squared_chord(prediction, target)
        return BYOLLoss(mean_value(nll.mean()), nll)


@validates_inputs
def cbyol_loss(
    mu_e: Float[Tensor, "batch dim"],
    mu_b: Float[Tensor, "batch dim"],
    y_hat: Float[Tensor, "batch dim_y"],
    y_prime: Float[Tensor, "batch dim_y"],
    *,
    z: Float[Tensor, "batch dim"],
    kappa_e: float = 16384.0,
    kappa_b: float = 10.0,
    beta: float | Float[Tensor, ""] = 1.0,
    weight: float = 2.0,
    residual_estimator: ResidualEstimator = "sampled",
    adaptive_weight: AdaptiveWeight | None = None,
) -> CBYOLLoss:
    """Return one direction of C-BYOL's loss: BYOL's loss of y_hat = l(z) plus beta I(X;Z|Y).

    `mu_e` and `mu_b` are the directions of e(z|x) and of b(z|y) = vMF(m(target(x)), kappa_b),
    both of the same view; `y_prime` is the target of the other view; `z` is a sample of
    e(z|x). weight = kappa_d / 2. `adaptive_weight` gives each image its own beta: see
    `image_beta`.
    """
    mu_e, mu_b = check_same_shape_2d(mu_e=mu_e, mu_b=mu_b)
    y_hat, y_prime = check_same_shape_2d(y_hat=y_hat, y_prime=y_prime)
    if len(mu_e) != len(y_hat):
        raise ValueError(f"y_hat must have as many rows as mu_e, {len(mu_e)}, got {len(y_hat)}")
    check_same_device("mu_e", mu_e, "y_hat", y_hat)
    check_nonnegative(kappa_e=kappa_e, kappa_b=kappa_b, weight=weight)
    check_beta(beta)
    check_one_of(RESIDUAL_ESTIMATORS, residual_estimator=residual_estimator)
    with full_precision(mu_e):
        e = _vmf(F.normalize(mu_e, dim=-1), kappa_e)
        b = _vmf(F.normalize(mu_b, dim=-1), kappa_b)
        z = check_unit_rows("mu_e", mu_e, "z", z)
        nll, (residual, entropy_e, reducible) = cbyol_terms(
            e, b, z, y_hat, y_prime, weight=weight, residual_estimator=residual_estimator
        )
        beta = image_beta(beta, nll, adaptive_weight)
        loss = mean_value(compress(nll, residual, beta).mean())
        return CBYOLLoss(loss, nll, residual, entropy_e, entropy_e + residual, reducible, beta)


def cbyol_terms(
    e: VonMisesFisher,
    b: VonMisesFisher,
    z: Float[Tensor, "batch dim"],
    y_hat: Float[Tensor, "batch dim_y"],
    y_prime: Float[Tensor, "batch dim_y"],
    *,
    weight: float,
    residual_estimator: ResidualEstimator,
    reparameterized: bool = False,
) -> "tuple[Tensor, ResidualTerms]":
    """Return -log d(y'|z) and the residual of one direction of C-BYOL, per image.

    Set `reparameterized` if z is `e.rsample()`: see `residual_terms`.
    """
    nll = byol_loss(y_hat, y_prime, weight=weight).nll
    return nll, residual_terms(z, e, b, residual_estimator, reparameterized)


@validates_inputs
def compress(
    nll: Float[Tensor, " batch"],
    residual: Float[Tensor, " batch"],
    beta: float | Float[Tensor, ""] | Float[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Return nll + beta * I(X;Z|Y): penalize what z keeps of its own view only.

    `nll` is the uncompressed loss of any method, one value per image, computed from the sample z.
    `beta` is one number, or one per image.
    """
    check_beta(beta, images=len(nll))
    if nll.dim() != 1 or nll.shape != residual.shape:
        raise ValueError(
            "nll and residual must have one value per image each, "
            f"got shapes {tuple(nll.shape)} and {tuple(residual.shape)}"
        )
    return nll + beta * residual


@validates_inputs
def image_beta(
    beta: float | Float[Tensor, ""],
    nll: Float[Tensor, " batch"],
    adaptive_weight: AdaptiveWeight | None,
) -> float | Tensor:
    """Return beta p, one value per image: compress images that z predicts well. None returns beta.

    p measures how well z predicts the other view. It is between 0 and 1 and has no gradient.

    - "likelihood": p = exp(-nll). With InfoNCE it is the probability of the positive. With a vMF
      decoder, whose nll is 0 at its mode, it is the density relative to the mode.
    - "rank": the fraction of the images of all processes whose nll is not smaller. The mean of p is
      about 1/2, whatever the scale of nll.
    """
    check_beta(beta)
    if adaptive_weight is None:
        return beta
    check_one_of(ADAPTIVE_WEIGHTS, adaptive_weight=adaptive_weight)
    nll = nll.detach()
    if adaptive_weight == "likelihood":
        return beta * torch.exp(-nll)
    ordered = gather(nll.unsqueeze(1)).flatten().sort().values
    smaller = torch.searchsorted(ordered, nll).to(nll.dtype)
    return beta * (1 - smaller / len(ordered))


def residual_information(
    z: Float[Tensor, "*batch dim"], e: VonMisesFisher, b: VonMisesFisher
) -> Float[Tensor, "*batch"]:
    """Return log e(z|x) - log b(z|y): nats that z keeps of X and that Y cannot predict, I(X;Z|Y).

    This is the estimate from one sample. Its standard deviation, about 11 nats at dimension 256,
    comes from log e and has no gradient.
    """
    return e.log_prob(z) - b.log_prob(z)


def expected_residual_information(e: VonMisesFisher, b: VonMisesFisher) -> Float[Tensor, "*batch"]:
    """Return KL[e(z|x) || b(z|y)]: the mean of residual_information over z, in closed form."""
    return kl_divergence(e, b)


def distributed_rsample(e: VonMisesFisher) -> Float[Tensor, "batch dim"]:
    """Draw z from e. The noise of an image does not depend on the number of processes.

    Every process draws the noise of all images and takes its rows. This needs the same seed in all
    processes, as the training loop sets it.
    """
    if world_size() == 1:
        return e.rsample()
    mu = e.mean_direction
    noise = torch.randn(world_size() * len(mu), e.dim, dtype=mu.dtype, device=mu.device)
    return e.from_noise(noise.chunk(world_size())[rank()].clone())


def _both_ways(
    z_x: Tensor,
    z_y: Tensor,
    mu_x: Tensor,
    mu_y: Tensor,
    kappa: float,
    own: bool,
    gather_chunk: int | None,
) -> tuple[Tensor, Tensor, float]:
    """Return -log d(y|z_x) and -log d(x|z_y) among the candidates of all processes, and log K."""
    bound = log_candidates(len(mu_x), own)
    if chunk := chunk_rows(len(mu_x), own, gather_chunk):
        pairs = both_directions(own)
        nll_x, nll_y = chunked_nll([z_x, z_y], [mu_x, mu_y], kappa, pairs, chunk)
        return nll_x, nll_y, bound
    if world_size() > 1:  # one collective for both views
        both = gather(torch.cat([mu_x, mu_y], dim=-1))
        mu_x, mu_y = both.chunk(2, dim=-1)
    nll_x = candidate_nll(z_x, torch.cat([mu_y, mu_x]) if own else mu_y, kappa, own)
    nll_y = candidate_nll(z_y, torch.cat([mu_x, mu_y]) if own else mu_x, kappa, own)
    return nll_x, nll_y, bound


class ResidualTerms(NamedTuple):
    """Information that z keeps of X alone, per image."""

    residual: Tensor  # I(X;Z|Y)
    entropy: Tensor  # H(e)
    reducible: Tensor  # KL[e||b] minus its value at equal means: kappa_b A(kappa_e) (1 - mu_e.mu_b)


def residual_terms(
    z: Tensor,
    e: VonMisesFisher,
    b: VonMisesFisher,
    residual_estimator: ResidualEstimator,
    reparameterized: bool,
) -> ResidualTerms:
    """Return the residual information of z, the entropy of e, and the reducible residual.

    A z that is drawn by `e.rsample()` moves with its mean, so log e(z|x) does not depend on the
    weights. It is therefore left out of the graph, which avoids rounding noise: its gradient terms
    cancel after a multiplication by kappa_e. The noise is 0.02 % of the gradient in float32 at
    kappa_e = 16384.
    """
    apart = 0.5 * (e.mean_direction - b.mean_direction).square().sum(-1)
    reducible = b.concentration * e.mean_resultant_length * apart
    if residual_estimator == "analytic":
        return ResidualTerms(expected_residual_information(e, b), e.entropy(), reducible)
    with torch.no_grad() if reparameterized else nullcontext():
        log_e = e.log_prob(z)
    return ResidualTerms(log_e - b.log_prob(z), -log_e, reducible)


def _squared_chord(u: Tensor, v: Tensor) -> Tensor:
    """Return 2 - 2 cos, as the squared distance of the directions."""
    return (F.normalize(u, dim=-1) - F.normalize(v, dim=-1)).square().sum(-1)


def _vmf(mu: Tensor, kappa: float) -> VonMisesFisher:
    return VonMisesFisher(mu, kappa, validate_args=False)
