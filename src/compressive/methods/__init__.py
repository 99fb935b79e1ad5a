"""Methods: SimCLR, MoCo v3, BYOL and SimSiam out of the same parts, each plain or compressed.

Two classes, since z is drawn at different places: at the direction that is compared (Contrastive),
or inside the predictor, with a head of its own for b(z|y) (Bootstrap). X and Y are the two views
of each image; both directions are summed, images are averaged.

Longer than 300 lines, so that the methods can be compared line by line.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import check_nonnegative, check_one_of, check_positive, promote_to_float32
from compressive.config import Config, is_compressed, is_contrastive
from compressive.distributed import mean_value
from compressive.distributions.vmf import VonMisesFisher
from compressive.info_nce import log_candidates
from compressive.networks import Ema, feature_dim, linear, mlp
from compressive.networks import build as build_backbone
from compressive.objectives import (
    RATES,
    Rate,
    ResidualTerms,
    byol_loss,
    compress,
    csimclr_loss,
    info_nce,
    residual_terms,
    simclr_loss,
)

Sample = Callable[[VonMisesFisher], Tensor]
BSees = Literal["own", "other"]
B_SEES: tuple[BSees, ...] = ("own", "other")


class Step(NamedTuple):
    """The loss of two views, and what else a run wants to know; only the loss has a gradient.

    Under torch.distributed the loss is that of all processes, all else is of this one's images.
    """

    loss: Float[Tensor, ""]
    feats_x: Float[Tensor, "batch feat"]  # what the backbone makes of X: no noise, no head
    feats_y: Float[Tensor, "batch feat"]
    r: Float[Tensor, "batch dim"]  # direction of the projection of X
    agreement: Float[Tensor, ""]  # mean cosine of the directions of X and Y
    nll: Float[Tensor, ""]  # mean over images and directions, as all below
    residual: Float[Tensor, ""] | None  # nats; compressed methods only
    movable: Float[Tensor, ""] | None  # its part above the floor at equal means
    predictive: Float[Tensor, ""] | None  # nats; contrastive methods only: log K - nll


class Contrastive(nn.Module):
    """Tell the other view of an image from those of other images: SimCLR, and MoCo v3.

    Without `target` the views are each other's candidates, and one forward pass takes both, so
    that batch norms see them together (SimCLR). With a target and a predictor, the prediction of
    a view looks for the target of the other among the targets (MoCo v3). kappa_b is one over the
    temperature.

    `kappa_e` compresses: z is drawn from vMF(direction, kappa_e), and beta is charged for each
    nat of it that vMF(direction of the other view, kappa_b) cannot tell. `sample` makes z.
    """

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
        rate: Rate = "sample",
        sample: Sample = VonMisesFisher.rsample,
    ) -> None:
        super().__init__()
        if (predictor is None) != (target is None):
            raise ValueError("predictor and target must come together (MoCo v3) or not at all")
        check_positive(kappa_b=kappa_b)
        check_nonnegative(kappa_e=kappa_e or 0.0)
        check_one_of(RATES, rate=rate)
        self.encoder, self.projection = encoder, projection
        self.predictor, self.target = predictor, target
        self.kappa_e, self.kappa_b = kappa_e, kappa_b
        self.own_view_negatives = own_view_negatives
        self.rate: Rate = rate
        self.sample = sample

    def forward(
        self,
        x: Float[Tensor, "batch channels h w"],
        y: Float[Tensor, "batch channels h w"],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """The loss of two views; a `beta` that changes should be a tensor, or it compiles anew."""
        if self.target is None:
            return self._simclr_step(x, y, beta)
        return self._moco_step(x, y, beta)

    def features(self, images: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch feat"]:
        """What the backbone makes of images."""
        return self.encoder(images)

    def update_target(self, rate: float) -> None:
        """Move the target, if there is one, after the optimizer's step."""
        if self.target is not None:
            self.target.update(nn.Sequential(self.encoder, self.projection), rate)

    def _simclr_step(self, x: Tensor, y: Tensor, beta: float | Tensor) -> Step:
        feats = self.encoder(torch.cat([x, y]))
        r = r_x, r_y = self.projection(feats).chunk(2)
        feats = feats.chunk(2)
        own = self.own_view_negatives
        if self.kappa_e is None:
            found = simclr_loss(r_x, r_y, temperature=1 / self.kappa_b, own_view_negatives=own)
            return _step(found.loss, feats, r, (found.nll_x, found.nll_y), bound=found.bound)
        z_x = z_y = None  # the objective draws them, and knows then that they move with r
        if self.sample is not VonMisesFisher.rsample:
            z_x, z_y = (self.sample(_vmf(_direction(each), self.kappa_e)) for each in r)
        kappas = {"kappa_e": self.kappa_e, "kappa_b": self.kappa_b}
        zs: dict[str, Any] = {"z_x": z_x, "z_y": z_y, "rate": self.rate}
        found = csimclr_loss(r_x, r_y, **kappas, beta=beta, **zs, own_view_negatives=own)
        # `movable` is the same in both directions: cos(x, y) is.
        kept = [
            ResidualTerms(each, found.entropy_e, found.movable)
            for each in (found.residual_x, found.residual_y)
        ]
        return _step(found.loss, feats, r, (found.nll_x, found.nll_y), kept, found.bound)

    def _moco_step(self, x: Tensor, y: Tensor, beta: float | Tensor) -> Step:
        assert self.predictor is not None
        assert self.target is not None
        feats = self.encoder(x), self.encoder(y)
        r = self.projection(feats[0]), self.projection(feats[1])
        mu_x, mu_y = _direction(self.predictor(r[0])), _direction(self.predictor(r[1]))
        k_y, k_x = _direction(self.target(y)), _direction(self.target(x))
        nll_x, excess_x = self._one_direction(mu_x, k_y, k_x)
        nll_y, excess_y = self._one_direction(mu_y, k_x, k_y)
        nll = nll_x, nll_y
        bound = log_candidates(len(x), self.own_view_negatives)
        if excess_x is None or excess_y is None:
            return _step(mean_value((nll_x + nll_y).mean()), feats, r, nll, bound=bound)
        total = compress(nll_x, excess_x.residual, beta) + compress(nll_y, excess_y.residual, beta)
        loss = mean_value(total.mean() - 2 * bound)
        return _step(loss, feats, r, nll, (excess_x, excess_y), bound)

    def _one_direction(
        self, mu: Tensor, other: Tensor, own: Tensor
    ) -> tuple[Tensor, ResidualTerms | None]:
        """One direction: -log d(y|z) among the targets, and what z holds that Y cannot tell."""
        z, kept = mu, None
        if self.kappa_e is not None:
            e, b = _vmf(mu, self.kappa_e), _vmf(other, self.kappa_b)
            z = self.sample(e)
            kept = residual_terms(z, e, b, self.rate, self.sample is VonMisesFisher.rsample)
        negatives = own if self.own_view_negatives else None
        return info_nce(z, other, self.kappa_b, own=negatives), kept


class Bootstrap(nn.Module):
    """Predict the target of the other view, and nothing else: BYOL, and SimSiam.

    Each view has a forward pass of its own. The target is a slow network (BYOL), or without one
    the projection of the other view, held fixed (SimSiam). The loss is that of a decoder
    d(y'|z) = vMF(prediction, kappa_d): BYOL's, times kappa_d / 2.

    `kappa_e` compresses: z is drawn around the direction of the prediction, `decoder` (l) reads
    y' from it, and `backward_encoder` (m) tells from the target of the same view where b(z|y)
    points, or with `b_sees` "other" from that of the other view, as in C-SimCLR. `sample` makes
    z.
    """

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
        b_sees: BSees = "own",
        rate: Rate = "sample",
        sample: Sample = VonMisesFisher.rsample,
    ) -> None:
        super().__init__()
        if len({part is None for part in (kappa_e, decoder, backward_encoder)}) > 1:
            raise ValueError(
                "kappa_e, decoder and backward_encoder must come together (compressed) or not "
                "at all"
            )
        check_nonnegative(kappa_d=kappa_d, kappa_e=kappa_e or 0.0, kappa_b=kappa_b)
        check_one_of(RATES, rate=rate)
        check_one_of(B_SEES, b_sees=b_sees)
        self.encoder, self.projection, self.predictor = encoder, projection, predictor
        self.target, self.decoder, self.backward_encoder = target, decoder, backward_encoder
        self.weight, self.kappa_e, self.kappa_b = kappa_d / 2, kappa_e, kappa_b
        self.b_sees: BSees = b_sees
        self.rate: Rate = rate
        self.sample = sample

    def forward(
        self,
        x: Float[Tensor, "batch channels h w"],
        y: Float[Tensor, "batch channels h w"],
        beta: float | Float[Tensor, ""] = 1.0,
    ) -> Step:
        """The loss of two views; a `beta` that changes should be a tensor, or it compiles anew."""
        feats = self.encoder(x), self.encoder(y)
        r = self.projection(feats[0]), self.projection(feats[1])
        q_x, q_y = self.predictor(r[0]), self.predictor(r[1])
        if self.target is None:
            t_y, t_x = r[1].detach(), r[0].detach()
        else:  # Y first, as in the official code: the order shows in the running statistics
            t_y, t_x = self.target(y), self.target(x)
        if self.kappa_e is None:
            to_y, to_x = (byol_loss(q, t, weight=self.weight) for q, t in ((q_x, t_y), (q_y, t_x)))
            return _step(to_y.loss + to_x.loss, feats, r, (to_y.nll, to_x.nll))
        assert self.backward_encoder is not None
        m_y, m_x = (self.backward_encoder(_direction(t)) for t in (t_y, t_x))
        if self.b_sees == "other":
            m_y, m_x = m_x, m_y
        nll_x, excess_x = self._one_direction(q_x, m_x, t_y, self.kappa_e)
        nll_y, excess_y = self._one_direction(q_y, m_y, t_x, self.kappa_e)
        total = compress(nll_x, excess_x.residual, beta) + compress(nll_y, excess_y.residual, beta)
        return _step(mean_value(total.mean()), feats, r, (nll_x, nll_y), (excess_x, excess_y))

    def features(self, images: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch feat"]:
        """What the backbone makes of images."""
        return self.encoder(images)

    def update_target(self, rate: float) -> None:
        """Move the target, if there is one, after the optimizer's step."""
        if self.target is not None:
            self.target.update(nn.Sequential(self.encoder, self.projection), rate)

    def _one_direction(
        self, q: Tensor, m: Tensor, y_prime: Tensor, kappa_e: float
    ) -> tuple[Tensor, ResidualTerms]:
        """One direction: -log d(y'|z), and what z holds that the target b sees cannot tell.

        `objectives.cbyol_loss` is the same. But it is given z and must differentiate log e(z|x),
        which for a z drawn here is a constant: in float32 at kappa_e = 16384 that alone makes
        0.02 % of noise in the gradient.
        """
        assert self.decoder is not None
        e, b = _vmf(_direction(q), kappa_e), _vmf(_direction(m), self.kappa_b)
        z = self.sample(e)
        nll = byol_loss(self.decoder(z), y_prime, weight=self.weight).nll
        return nll, residual_terms(z, e, b, self.rate, self.sample is VonMisesFisher.rsample)


Builder = Callable[[Config], Contrastive | Bootstrap]


def build(config: Config) -> Contrastive | Bootstrap:
    """The method that a config describes; its weights come from torch's generator."""
    encoder, projection = online = _online(config)
    target = None
    if config.method.removeprefix("c-") in ("byol", "moco-v3"):
        own = config.target.independent
        target = Ema(nn.Sequential(*(_online(config) if own else copy.deepcopy(online))))
    network, bottleneck = config.network, config.bottleneck
    out, biased = network.out, network.biased_variance
    head = partial(mlp, out, network.hidden, out, biased_variance=biased)
    # At its mode z has the highest density there is, and says nothing of the mean over z.
    rate = bottleneck.rate if bottleneck.sample else "closed"
    settings: dict[str, Any] = {"kappa_b": bottleneck.kappa_b, "rate": rate}
    if is_compressed(config):
        settings["kappa_e"] = bottleneck.kappa_e
        settings["sample"] = VonMisesFisher.rsample if bottleneck.sample else _at_mode
    if is_contrastive(config):
        # MoCo v3 looks among the targets of the other view only.
        settings["own_view_negatives"] = config.decoder.own_view_negatives and target is None
        settings["predictor"] = None if target is None else head()
        return Contrastive(encoder, projection, target=target, **settings)
    if is_compressed(config):
        settings |= {"decoder": linear(out, out), "backward_encoder": head()}
        settings["b_sees"] = bottleneck.b_sees
    settings["kappa_d"] = config.decoder.kappa_d
    return Bootstrap(encoder, projection, head(), target=target, **settings)


def _online(config: Config) -> tuple[nn.Module, nn.Module]:
    """A backbone and a projection."""
    network = config.network
    encoder = build_backbone(network, config.views.size)
    head = mlp(
        feature_dim(encoder),
        network.hidden,
        network.out,
        layers=network.head_layers,
        last_norm=network.head_last_norm,
        biased_variance=network.biased_variance,
    )
    return encoder, head


def _step(
    loss: Tensor,
    feats: tuple[Tensor, ...],
    r: tuple[Tensor, ...],
    nll: tuple[Tensor, ...],
    kept: Sequence[ResidualTerms] = (),
    bound: float | None = None,
) -> Step:
    """What a run sees, of per-image values in each direction."""
    feats_x, feats_y = (each.detach() for each in feats)
    mu_x, mu_y = (_direction(each.detach()) for each in r)
    agreement = (mu_x * mu_y).sum(-1).mean()
    nll_mean = _mean(nll)
    residual = _mean([each.residual for each in kept]) if kept else None
    movable = _mean([each.movable for each in kept]) if kept else None
    predictive = None if bound is None else bound - nll_mean
    return Step(loss, feats_x, feats_y, mu_x, agreement, nll_mean, residual, movable, predictive)


def _mean(directions: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(directions)).detach().mean()


def _direction(r: Tensor) -> Tensor:
    return F.normalize(promote_to_float32("a projection", r), dim=-1)


def _vmf(mu: Tensor, kappa: float) -> VonMisesFisher:
    return VonMisesFisher(mu, kappa, validate_args=False)


def _at_mode(e: VonMisesFisher) -> Tensor:
    return e.mode
