"""BYOL and SimSiam, plain and compressed."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import check_nonnegative, check_one_of
from compressive.config import Config, is_compressed
from compressive.distributed import mean_value
from compressive.distributions.vmf import VonMisesFisher
from compressive.methods.bottleneck import Channel, Sample, channel_settings
from compressive.methods.parts import build_online, build_predictor, build_target
from compressive.methods.step import Embeddings, Method, Step, direction, exchange, make_step
from compressive.networks import Ema, linear
from compressive.objectives import (
    AdaptiveWeight,
    ResidualEstimator,
    byol_loss,
    cbyol_terms,
    compress,
)

BackwardView = Literal["own", "other"]


class Bootstrap(Method):
    """Predict the target of the other view without negatives: BYOL and SimSiam.

    Each view has its own forward pass. The target is an EMA network (BYOL), or without one the
    detached projection of the other view (SimSiam). The loss is that of a decoder
    d(y'|z) = vMF(prediction, kappa_d): BYOL's, times kappa_d / 2.

    `kappa_e` turns on compression. z is drawn around the direction of the prediction. `decoder` (l)
    predicts y' from z. `backward_encoder` (m) predicts the mean of b(z|y) from the target of the
    same view, or with `backward_view="other"` from that of the other view, as in C-SimCLR. `sample`
    draws z. `adaptive_weight` gives each image its own beta.
    """

    projection: nn.Module
    predictor: nn.Module
    target: Ema | None
    decoder: nn.Module | None
    backward_encoder: nn.Module | None
    weight: float
    backward_view: BackwardView

    def __init__(
        self,
        encoder: nn.Module,
        projection: nn.Module,
        predictor: nn.Module,
        *,
        target: Ema | None = None,
        decoder: nn.Module | None = None,
        backward_encoder: nn.Module | None = None,
        kappa_d: float = 4.0,
        kappa_e: float | None = None,
        kappa_b: float = 10.0,
        backward_view: BackwardView = "own",
        residual_estimator: ResidualEstimator = "sampled",
        sample: Sample = VonMisesFisher.rsample,
        adaptive_weight: AdaptiveWeight | None = None,
    ) -> None:
        super().__init__()
        if len({part is None for part in (kappa_e, decoder, backward_encoder)}) > 1:
            raise ValueError(
                "give all of kappa_e, decoder and backward_encoder (compressed) or none of them"
            )
        check_nonnegative(kappa_d=kappa_d, kappa_b=kappa_b)
        check_one_of(get_args(BackwardView), backward_view=backward_view)
        self.encoder, self.projection, self.predictor = encoder, projection, predictor
        self.target, self.decoder, self.backward_encoder = target, decoder, backward_encoder
        self.weight, self.backward_view = kappa_d / 2, backward_view
        self.channel = Channel.of(kappa_e, kappa_b, residual_estimator, sample, adaptive_weight)

    def forward(
        self,
        views: Sequence[Float[Tensor, "batch channels h w"]],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """Return the loss of two views."""
        x, y = views
        feats = self.encoder(x), self.encoder(y)
        r = self.projection(feats[0]), self.projection(feats[1])
        q_x, q_y = self.predictor(r[0]), self.predictor(r[1])
        if self.target is None:
            t_y, t_x = r[1].detach(), r[0].detach()
        else:  # Y first, as in the official code: the order affects running statistics
            t_y, t_x = self.target(y), self.target(x)
        if self.channel is None:
            to_y, to_x = (byol_loss(q, t, weight=self.weight) for q, t in ((q_x, t_y), (q_y, t_x)))
            return make_step(to_y.loss + to_x.loss, feats, r, (to_y.nll, to_x.nll))
        assert self.backward_encoder is not None
        assert self.decoder is not None
        m_y, m_x = (self.backward_encoder(direction(t)) for t in (t_y, t_x))
        if self.backward_view == "other":
            m_y, m_x = m_x, m_y
        terms = []
        for q, m, y_prime in ((q_x, m_x, t_y), (q_y, m_y, t_x)):
            z, e = self.channel.draw(direction(q))
            b = self.channel.backward(direction(m))
            terms.append(
                cbyol_terms(
                    e,
                    b,
                    z,
                    self.decoder(z),
                    y_prime,
                    weight=self.weight,
                    residual_estimator=self.channel.residual_estimator,
                    reparameterized=self.channel.is_reparameterized,
                )
            )
        (nll_x, residual_x), (nll_y, residual_y) = terms
        betas = self.channel.image_beta(beta, nll_x), self.channel.image_beta(beta, nll_y)
        total = compress(nll_x, residual_x.residual, betas[0])
        total = total + compress(nll_y, residual_y.residual, betas[1])
        residuals = residual_x, residual_y
        loss = mean_value(total.mean())
        return make_step(loss, feats, r, (nll_x, nll_y), residuals, betas=betas)

    def update_target(self, decay: float) -> None:
        """Update the target, if there is one."""
        if self.target is not None:
            self.target.update(nn.Sequential(self.encoder, self.projection), decay)

    def embeddings(self, images: Float[Tensor, "twice channels h w"]) -> Embeddings:
        """Return projections, predictions and means of b(z|y) of views X, then Y."""
        r = self.projection(self.encoder(images))
        mu_b = None
        if self.backward_encoder is not None:
            target = direction(r if self.target is None else self.target(images))
            seen = target if self.backward_view == "own" else exchange(target)
            mu_b = direction(self.backward_encoder(seen))
        return Embeddings(direction(r), direction(self.predictor(r)), mu_b)


def build(config: Config, *, biased_variance: bool = False) -> Bootstrap:
    """Build BYOL or SimSiam, compressed or not."""
    encoder, projection = online = build_online(config, biased_variance=biased_variance)
    target = build_target(config, online, biased_variance=biased_variance)
    out = config.network.projection_dim
    compressed: dict[str, Any] = {}
    if is_compressed(config):
        compressed = {
            "decoder": linear(out, out),
            "backward_encoder": build_predictor(config, biased_variance=biased_variance),
            "backward_view": config.bottleneck.backward_view,
        }
    return Bootstrap(
        encoder,
        projection,
        build_predictor(config, biased_variance=biased_variance),
        target=target,
        kappa_d=config.decoder.kappa_d,
        kappa_b=config.bottleneck.kappa_b,
        **compressed,
        **channel_settings(config),
    )
