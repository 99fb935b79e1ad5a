"""The stochastic bottleneck of compressed methods: draw z and measure its residual information."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from compressive.checks import check_nonnegative, check_one_of
from compressive.config import Config, is_compressed
from compressive.distributions.vmf import VonMisesFisher
from compressive.objectives import (
    ADAPTIVE_WEIGHTS,
    RESIDUAL_ESTIMATORS,
    AdaptiveWeight,
    ResidualEstimator,
    ResidualTerms,
    distributed_rsample,
    image_beta,
    residual_terms,
)

Sample = Callable[[VonMisesFisher], Tensor]


class Channel(NamedTuple):
    """The encoder e(z|x) = vMF(mu_e, kappa_e) and the backward encoder b(z|y) = vMF(mu_b, kappa_b).

    `sample` draws z from e. `adaptive_weight` gives each image its own beta.
    """

    kappa_e: float
    kappa_b: float = 10.0
    residual_estimator: ResidualEstimator = "sampled"
    sample: Sample = VonMisesFisher.rsample
    adaptive_weight: AdaptiveWeight | None = None

    @classmethod
    def of(
        cls,
        kappa_e: float | None,
        kappa_b: float,
        residual_estimator: ResidualEstimator,
        sample: Sample,
        adaptive_weight: AdaptiveWeight | None,
    ) -> "Channel | None":
        """Check the arguments of a method; return None if it is not compressed."""
        check_nonnegative(kappa_e=kappa_e or 0.0, kappa_b=kappa_b)
        check_one_of(RESIDUAL_ESTIMATORS, residual_estimator=residual_estimator)
        if adaptive_weight is not None:
            check_one_of(ADAPTIVE_WEIGHTS, adaptive_weight=adaptive_weight)
        if kappa_e is None:
            return None
        return cls(kappa_e, kappa_b, residual_estimator, sample, adaptive_weight)

    @property
    def is_reparameterized(self) -> bool:
        """Return whether z moves with the mean of e, so that log e(z|x) has no gradient."""
        return self.sample is VonMisesFisher.rsample

    def draw(self, mu_e: Float[Tensor, "batch dim"]) -> tuple[Tensor, VonMisesFisher]:
        """Draw z from e(z|x); return it with e."""
        e = VonMisesFisher(mu_e, self.kappa_e, validate_args=False)
        return distributed_rsample(e) if self.is_reparameterized else self.sample(e), e

    def backward(self, mu_b: Float[Tensor, "batch dim"]) -> VonMisesFisher:
        """Return b(z|y)."""
        return VonMisesFisher(mu_b, self.kappa_b, validate_args=False)

    def residual(
        self, z: Float[Tensor, "batch dim"], e: VonMisesFisher, mu_b: Float[Tensor, "batch dim"]
    ) -> ResidualTerms:
        """Return what z keeps of X that b(z|y) cannot predict, per image."""
        b = self.backward(mu_b)
        return residual_terms(z, e, b, self.residual_estimator, self.is_reparameterized)

    def image_beta(
        self, beta: float | Float[Tensor, ""], nll: Float[Tensor, " batch"]
    ) -> float | Tensor:
        """Return the weight of the residual, one value per image if it is adaptive."""
        return image_beta(beta, nll, self.adaptive_weight)


def channel_settings(config: Config) -> dict[str, Any]:
    """Return the keyword arguments of a compressed method; empty if it is not compressed."""
    if not is_compressed(config):
        return {}
    settings = config.bottleneck
    # At the mode the log ratio is no estimate of its mean over z: use the analytic residual.
    return {
        "kappa_e": settings.kappa_e,
        "residual_estimator": settings.residual_estimator if settings.stochastic else "analytic",
        "sample": VonMisesFisher.rsample if settings.stochastic else _at_mode,
        "adaptive_weight": settings.adaptive_weight if settings.schedule == "adaptive" else None,
    }


def _at_mode(e: VonMisesFisher) -> Tensor:
    return e.mode
