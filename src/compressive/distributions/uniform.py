"""The uniform distribution on the unit sphere, and its KL divergences."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, kl_divergence, register_kl

from compressive.checks import promote_to_float32, should_check_values, validates_inputs
from compressive.distributions import special
from compressive.distributions.vmf import VonMisesFisher, same_dimension, unit_vector

__all__ = ["HypersphericalUniform"]


class HypersphericalUniform(Distribution):
    """Uniform distribution of directions in R^dim: the vMF distribution at concentration 0."""

    arg_constraints: Any = {}  # noqa: RUF012
    support: Any = unit_vector
    has_rsample = True

    @validates_inputs
    def __init__(
        self,
        dim: int,
        batch_shape: tuple[int, ...] = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(dim, int) or dim < 2:
            raise ValueError(f"dim must be a whole number of 2 or more, got {dim}")
        self.dim = dim
        target = promote_to_float32("dtype", torch.empty((), dtype=dtype)).dtype
        self._entropy = torch.tensor(special.log_area(dim), dtype=target, device=device)
        super().__init__(torch.Size(batch_shape), torch.Size((dim,)), validate_args=False)
        if validate_args is None:
            validate_args = type(self)._validate_args and should_check_values(self._entropy)
        self._validate_args = validate_args

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "HypersphericalUniform":
        """Return the same distribution with its batch axes expanded."""
        new: Any = self._get_checked_instance(HypersphericalUniform, _instance)
        new.dim, new._entropy = self.dim, self._entropy
        batch_shape = torch.Size(batch_shape)
        Distribution.__init__(new, batch_shape, self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Float[Tensor, "*batch dim"]:
        """The origin."""
        return self._entropy.new_zeros(self._extended_shape())

    @property
    def variance(self) -> Float[Tensor, "*batch dim"]:
        """1/dim for each coordinate."""
        return self._entropy.new_full(self._extended_shape(), 1 / self.dim)

    @validates_inputs
    def log_prob(self, value: Float[Tensor, "*sample dim"]) -> Float[Tensor, "..."]:
        """Return minus the log area of the sphere for each vector."""
        if self._validate_args and not torch.compiler.is_compiling():
            self._validate_sample(value)
        return -self._entropy.expand(torch.broadcast_shapes(value.shape[:-1], self._batch_shape))

    def entropy(self) -> Float[Tensor, "*batch"]:
        """Return the log area of the sphere, the largest possible entropy on it."""
        return self._entropy.expand(self._batch_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Float[Tensor, "..."]:
        """Draw normalized standard normal vectors."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self._entropy.dtype, device=self._entropy.device)
        return torch.nn.functional.normalize(noise, dim=-1)


@register_kl(VonMisesFisher, HypersphericalUniform)
def _kl_vmf_uniform(p: VonMisesFisher, q: HypersphericalUniform) -> Tensor:
    """Return the log area minus the entropy of p, as the KL divergence to vMF with kappa = 0."""
    same_dimension(p, q)
    found = kl_divergence(p, VonMisesFisher(p.mean_direction, 0.0, validate_args=False))
    return found.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


@register_kl(HypersphericalUniform, VonMisesFisher)
def _kl_uniform_vmf(p: HypersphericalUniform, q: VonMisesFisher) -> Tensor:
    """Return the KL divergence from vMF with kappa = 0."""
    same_dimension(p, q)
    found = kl_divergence(VonMisesFisher(q.mean_direction, 0.0, validate_args=False), q)
    return found.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


@register_kl(HypersphericalUniform, HypersphericalUniform)
def _kl_uniform_uniform(p: HypersphericalUniform, q: HypersphericalUniform) -> Tensor:
    same_dimension(p, q)
    return torch.zeros_like(p.entropy() + q.entropy())
