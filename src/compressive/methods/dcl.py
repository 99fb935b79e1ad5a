"""Decoupled contrastive learning (Yeh et al., 2021): no positive in the denominator of InfoNCE.

InfoNCE's gradient has a factor 1 - p, where p is the probability of the positive, so pairs that
are already close stop attracting each other. Without the positive in the denominator there is no
such factor.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import (
    check_positive,
    check_same_shape_2d,
    full_precision,
    validates_inputs,
)
from compressive.config import Config
from compressive.distributed import gather, mean_value
from compressive.info_nce import both_directions, candidate_logits, chunk_rows, chunked_nll
from compressive.methods.parts import build_online
from compressive.methods.step import Embeddings, Method, Step, direction, make_step


class DCLLoss(NamedTuple):
    """The decoupled loss; per image unless noted."""

    loss: Float[Tensor, ""]  # mean over images, sum over directions
    nll_x: Float[Tensor, " batch"]  # log of the summed negatives over the positive, given X
    nll_y: Float[Tensor, " batch"]


@validates_inputs
def dcl_loss(
    r_x: Float[Tensor, "batch dim"],
    r_y: Float[Tensor, "batch dim"],
    *,
    temperature: float = 0.1,
    own_view_negatives: bool = True,
    gather_chunk: int | None = None,
) -> DCLLoss:
    """Return -log(exp(positive) / sum of exp(negatives)), summed over both directions.

    The candidates are those of `simclr_loss`, without the positive in the sum. The loss can be
    negative. Under torch.distributed the candidates of all processes are gathered; `gather_chunk`
    limits the memory that this takes: see docs/large-batches.md.
    """
    r_x, r_y = check_same_shape_2d(r_x=r_x, r_y=r_y)
    check_positive(temperature=temperature)
    with full_precision(r_x):
        mu = mu_x, mu_y = direction(r_x), direction(r_y)
        if chunk := chunk_rows(len(r_x), own_view_negatives, gather_chunk):
            pairs, kappa = both_directions(own_view_negatives), 1 / temperature
            nll_x, nll_y = chunked_nll(mu, mu, kappa, pairs, chunk, decoupled=True)
            return DCLLoss(mean_value((nll_x + nll_y).mean()), nll_x, nll_y)
        all_x, all_y = gather(torch.cat([mu_x, mu_y], dim=-1)).chunk(2, dim=-1)
        own = own_view_negatives
        nll_x = _decoupled_nll(mu_x, torch.cat([all_y, all_x]) if own else all_y, temperature, own)
        nll_y = _decoupled_nll(mu_y, torch.cat([all_x, all_y]) if own else all_x, temperature, own)
        return DCLLoss(mean_value((nll_x + nll_y).mean()), nll_x, nll_y)


def _decoupled_nll(mu: Tensor, candidates: Tensor, temperature: float, own: bool) -> Tensor:
    logits, positives = candidate_logits(mu, candidates, 1 / temperature, own, 0, len(mu))
    at = positives.unsqueeze(1)
    negatives = logits.scatter(1, at, -math.inf)
    return torch.logsumexp(negatives, dim=1) - logits.gather(1, at).squeeze(1)


class DCL(Method):
    """SimCLR with the decoupled loss: both views pass through the network together."""

    projection: nn.Module
    temperature: float
    own_view_negatives: bool
    gather_chunk: int | None

    def __init__(
        self,
        encoder: nn.Module,
        projection: nn.Module,
        *,
        temperature: float = 0.1,
        own_view_negatives: bool = True,
        gather_chunk: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.encoder, self.projection = encoder, projection
        self.temperature, self.own_view_negatives = temperature, own_view_negatives
        self.gather_chunk = gather_chunk

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """Return the loss of two views; `beta` is unused."""
        x, y = views
        feats = self.encoder(torch.cat([x, y]))
        r = self.projection(feats).chunk(2)
        found = dcl_loss(
            *r,
            temperature=self.temperature,
            own_view_negatives=self.own_view_negatives,
            gather_chunk=self.gather_chunk,
        )
        return make_step(found.loss, feats.chunk(2), r, (found.nll_x, found.nll_y))

    def embeddings(self, images: Float[Tensor, "twice channels h w"]) -> Embeddings:
        """Return the projections of views X, then Y."""
        mu = direction(self.projection(self.encoder(images)))
        return Embeddings(mu, mu)


def build(config: Config, *, biased_variance: bool = False) -> DCL:
    """Build DCL; its temperature is 1 / bottleneck.kappa_b, as SimCLR's."""
    encoder, projection = build_online(config, biased_variance=biased_variance)
    return DCL(
        encoder,
        projection,
        temperature=1 / config.bottleneck.kappa_b,
        own_view_negatives=config.decoder.same_view_negatives,
        gather_chunk=config.train.gather_chunk,
    )
