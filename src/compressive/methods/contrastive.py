"""SimCLR and MoCo v3, plain and compressed."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import check_positive
from compressive.config import Config
from compressive.distributed import mean_value
from compressive.distributions.vmf import VonMisesFisher
from compressive.info_nce import info_nce, log_candidates
from compressive.methods.bottleneck import Channel, Sample, channel_settings
from compressive.methods.parts import build_online, build_predictor, build_target
from compressive.methods.step import Embeddings, Method, Step, direction, exchange, make_step
from compressive.networks import Ema
from compressive.objectives import (
    AdaptiveWeight,
    ResidualEstimator,
    ResidualTerms,
    compress,
    csimclr_loss,
    simclr_loss,
)


class Contrastive(Method):
    """Find the other view of an image among views of other images: SimCLR and MoCo v3.

    Without `target`, the views are each other's candidates. One forward pass takes both, so that
    batch norms see them together (SimCLR). With a target and a predictor, the prediction of a
    view is matched with the target of the other view among all targets (MoCo v3). kappa_b is the
    inverse temperature.

    `kappa_e` turns on compression. z is drawn from vMF(direction, kappa_e), and beta weights the
    nats of z that vMF(direction of the other view, kappa_b) cannot predict. `sample` draws z.
    `adaptive_weight` gives each image its own beta. `gather_chunk` limits the memory of several
    processes: see docs/large-batches.md.
    """

    projection: nn.Module
    predictor: nn.Module | None
    target: Ema | None
    kappa_b: float
    own_view_negatives: bool
    gather_chunk: int | None

    def __init__(
        self,
        encoder: nn.Module,
        projection: nn.Module,
        *,
        predictor: nn.Module | None = None,
        target: Ema | None = None,
        kappa_e: float | None = None,
        kappa_b: float = 10.0,
        own_view_negatives: bool = True,
        residual_estimator: ResidualEstimator = "sampled",
        sample: Sample = VonMisesFisher.rsample,
        adaptive_weight: AdaptiveWeight | None = None,
        gather_chunk: int | None = None,
    ) -> None:
        super().__init__()
        if (predictor is None) != (target is None):
            raise ValueError("give both predictor and target (MoCo v3) or neither")
        check_positive(kappa_b=kappa_b)
        self.encoder, self.projection = encoder, projection
        self.predictor, self.target = predictor, target
        self.kappa_b, self.own_view_negatives = kappa_b, own_view_negatives
        self.gather_chunk = gather_chunk
        self.channel = Channel.of(kappa_e, kappa_b, residual_estimator, sample, adaptive_weight)

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """Return the loss of two views."""
        x, y = views
        return self._simclr_step(x, y, beta) if self.target is None else self._moco_step(x, y, beta)

    def update_target(self, decay: float) -> None:
        """Update the target, if there is one."""
        if self.target is not None:
            self.target.update(nn.Sequential(self.encoder, self.projection), decay)

    def _simclr_step(self, x: Tensor, y: Tensor, beta: float | Tensor) -> Step:
        feats = self.encoder(torch.cat([x, y]))
        r = r_x, r_y = self.projection(feats).chunk(2)
        feats = feats.chunk(2)
        channel = self.channel
        candidates: dict[str, Any] = {
            "own_view_negatives": self.own_view_negatives,
            "gather_chunk": self.gather_chunk,
        }
        if channel is None:
            found = simclr_loss(r_x, r_y, temperature=1 / self.kappa_b, **candidates)
            return make_step(found.loss, feats, r, (found.nll_x, found.nll_y), bound=found.bound)
        z_x = z_y = None  # the objective draws them, which leaves log e(z|x) without gradient
        if not channel.is_reparameterized:
            (z_x, _), (z_y, _) = channel.draw(direction(r_x)), channel.draw(direction(r_y))
        found = csimclr_loss(
            r_x,
            r_y,
            kappa_e=channel.kappa_e,
            kappa_b=channel.kappa_b,
            beta=beta,
            z_x=z_x,
            z_y=z_y,
            residual_estimator=channel.residual_estimator,
            adaptive_weight=channel.adaptive_weight,
            **candidates,
        )
        # The reducible residual is the same in both directions, because cos(x, y) is.
        residuals = [
            ResidualTerms(each, found.entropy_e, found.reducible_residual)
            for each in (found.residual_x, found.residual_y)
        ]
        nll, betas = (found.nll_x, found.nll_y), (found.beta_x, found.beta_y)
        return make_step(found.loss, feats, r, nll, residuals, found.bound, betas)

    def _moco_step(self, x: Tensor, y: Tensor, beta: float | Tensor) -> Step:
        assert self.predictor is not None
        assert self.target is not None
        feats = self.encoder(x), self.encoder(y)
        r = self.projection(feats[0]), self.projection(feats[1])
        mu_x, mu_y = direction(self.predictor(r[0])), direction(self.predictor(r[1]))
        k_y, k_x = direction(self.target(y)), direction(self.target(x))
        nll_x, residual_x = self._one_direction(mu_x, k_y, k_x)
        nll_y, residual_y = self._one_direction(mu_y, k_x, k_y)
        nll = nll_x, nll_y
        bound = log_candidates(len(x), self.own_view_negatives)
        if self.channel is None or residual_x is None or residual_y is None:
            return make_step(mean_value((nll_x + nll_y).mean()), feats, r, nll, bound=bound)
        betas = self.channel.image_beta(beta, nll_x), self.channel.image_beta(beta, nll_y)
        total = compress(nll_x, residual_x.residual, betas[0])
        total = total + compress(nll_y, residual_y.residual, betas[1])
        loss = mean_value(total.mean() - 2 * bound)
        return make_step(loss, feats, r, nll, (residual_x, residual_y), bound, betas)

    def _one_direction(
        self, mu: Tensor, other: Tensor, own: Tensor
    ) -> tuple[Tensor, ResidualTerms | None]:
        """Return -log d(y|z) among the targets, and the residual terms of z."""
        z, residual = mu, None
        if self.channel is not None:
            z, e = self.channel.draw(mu)
            residual = self.channel.residual(z, e, other)
        return self._nll(z, other, own), residual

    def _nll(self, z: Tensor, other: Tensor, own: Tensor) -> Tensor:
        negatives = own if self.own_view_negatives else None
        return info_nce(z, other, self.kappa_b, own=negatives, gather_chunk=self.gather_chunk)

    def embeddings(self, images: Float[Tensor, "twice channels h w"]) -> Embeddings:
        """Return projections, their means and the candidates of views X, then Y."""
        r = self.projection(self.encoder(images))
        mu = direction(r if self.predictor is None else self.predictor(r))
        target = direction(r if self.target is None else self.target(images))
        return Embeddings(direction(r), mu, exchange(target), target)

    def bound(self, batch: int) -> float:
        """Return log K of a batch."""
        return log_candidates(batch, self.own_view_negatives)

    def predictive(
        self, z: Float[Tensor, "twice dim"], target: Float[Tensor, "twice dim"]
    ) -> Float[Tensor, " batch"]:
        """Return log K - nll, averaged over both directions."""
        (z_x, z_y), (t_x, t_y) = z.chunk(2), target.chunk(2)
        nll_x, nll_y = self._nll(z_x, t_y, t_x), self._nll(z_y, t_x, t_y)
        return self.bound(len(z_x)) - 0.5 * (nll_x + nll_y)


def build(config: Config, *, biased_variance: bool = False) -> Contrastive:
    """Build SimCLR or MoCo v3, compressed or not."""
    encoder, projection = online = build_online(config, biased_variance=biased_variance)
    target = build_target(config, online, biased_variance=biased_variance)
    is_moco = target is not None
    return Contrastive(
        encoder,
        projection,
        predictor=build_predictor(config, biased_variance=biased_variance) if is_moco else None,
        target=target,
        # MoCo v3 compares with the targets of the other view only.
        own_view_negatives=config.decoder.same_view_negatives and not is_moco,
        kappa_b=config.bottleneck.kappa_b,
        gather_chunk=config.train.gather_chunk,
        **channel_settings(config),
    )
