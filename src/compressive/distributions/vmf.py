"""The von Mises-Fisher distribution on the unit sphere, as a torch distribution."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Distribution, constraints, register_kl

from compressive.checks import (
    can_check_values,
    check_same_device,
    differentiable_once,
    full_precision,
    in_func_transform,
    promote_to_float32,
    should_check_values,
    validates_inputs,
)
from compressive.distributions import radial_polynomial, special, vmf_sampler
from compressive.distributions.tracing import traced_as_constant
from compressive.platforms.float64 import float64_device, to_float64

__all__ = ["VonMisesFisher"]


class _UnitVector(constraints.Constraint):
    """Vectors of length one; the tolerance allows rounding in float32 but not in bfloat16."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(value, dim=-1) - 1).abs() < 1e-5


unit_vector: constraints.Constraint = _UnitVector()

_SAMPLES = "samples of VonMisesFisher"
_LARGEST = 1e100  # its square must not overflow; tested to 1e8


class VonMisesFisher(Distribution):
    """Directions around `mean_direction` mu with density C_n(kappa) exp(kappa mu.z) on the sphere.

    `concentration` kappa >= 0 is a number, whose constants are computed once, or a tensor that
    broadcasts against the batch and may require a gradient. kappa = 0 is the uniform distribution.
    For a tensor, the first sample in each dimension n computes a table, which takes up to a second.

    Sampling needs no rejection: shapes are fixed, nothing waits for the device, and it compiles
    into one graph. The gradient in mu is by parallel transport of the sample along the sphere
    (bounded everywhere), that in kappa by implicit reparameterization. Before a CUDA graph is
    captured, call its functions once, which copies tables to the device.

    All computations are at least float32, also under autocast: at n = 256, kappa = 16384 bfloat16
    would be wrong by tens of nats. `validate_args=None` checks values on the CPU only, True on all
    devices.
    """

    # torch declares these two as properties; its own distributions override them like this.
    arg_constraints: Any = {  # noqa: RUF012
        "mean_direction": unit_vector,
        "concentration": constraints.nonnegative,
    }
    support: Any = unit_vector
    has_rsample = True

    @validates_inputs
    def __init__(
        self,
        mean_direction: Float[Tensor, "*batch dim"],
        concentration: float | Float[Tensor, "..."],
        validate_args: bool | None = None,
    ) -> None:
        mean_direction = promote_to_float32("mean_direction", mean_direction)
        if mean_direction.dim() == 0 or mean_direction.shape[-1] < 2:
            rule = "mean_direction must have a last axis of dimension 2 or more"
            raise ValueError(f"{rule}, got shape {tuple(mean_direction.shape)}")
        *batch, n = mean_direction.shape
        n = operator.index(n)  # an int, even if torch.compile made it a symbol
        self._kappa: Any = concentration  # a number or a tensor; arithmetic is the same for both
        self._fixed = None
        if isinstance(concentration, Tensor):
            parameters = mean_direction, concentration
            batch, mean_direction, self._kappa = _broadcast_parameters(*parameters)
        else:
            if not 0 <= concentration <= _LARGEST:
                allowed = f"a number from 0 to {_LARGEST:g}"
                raise ValueError(f"concentration must be {allowed}, got {concentration}")
            # float() would keep a symbol if a compiled caller uses a second kappa.
            self._kappa = concentration.__float__()
            self._fixed = _constants(self._kappa, n)
        self.mean_direction: Tensor = mean_direction.expand((*batch, n))
        super().__init__(torch.Size(batch), torch.Size((n,)), validate_args=False)
        if validate_args is None:
            given = [each for each in (mean_direction, concentration) if isinstance(each, Tensor)]
            validate_args = type(self)._validate_args and all(map(should_check_values, given))
        self._validate_args = validate_args
        if validate_args and not torch.compiler.is_compiling():
            self._check_values(mean_direction, concentration)

    @staticmethod
    def _check_values(mean_direction: Tensor, concentration: float | Tensor) -> None:
        if not (ok := unit_vector.check(mean_direction)).all():
            norm = torch.linalg.vector_norm(mean_direction[~ok], dim=-1).flatten()[0].item()
            rule = f"mean_direction must hold vectors of length 1, got one of length {norm:.6g}"
            raise ValueError(f"{rule}; use torch.nn.functional.normalize(mean_direction, dim=-1)")
        if isinstance(concentration, Tensor):
            ok = (concentration >= 0) & (concentration <= _LARGEST)
            if not ok.all():
                bad = concentration[~ok].flatten()[0].item()
                raise ValueError(f"concentration must be from 0 to {_LARGEST:g}, got {bad}")

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "VonMisesFisher":
        """Return the same distribution with its batch axes expanded, without copying."""
        new: Any = self._get_checked_instance(VonMisesFisher, _instance)
        batch_shape = torch.Size(batch_shape)
        new._fixed, new._kappa = self._fixed, self._kappa
        new.mean_direction = self.mean_direction.expand(batch_shape + self._event_shape)
        Distribution.__init__(new, batch_shape, self._event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """Dimension n of the space R^n that contains the sphere."""
        return self._event_shape[0]

    @property
    def concentration(self) -> Float[Tensor, "*batch"]:
        """Kappa, one per distribution of the batch."""
        return self._per_batch(self._kappa)

    @property
    def mode(self) -> Float[Tensor, "*batch dim"]:
        """Direction of the highest density: mu."""
        return self.mean_direction

    @property
    def mean(self) -> Float[Tensor, "*batch dim"]:
        """E[z] = A_n(kappa) mu; its length is below one."""
        return self.mean_resultant_length.unsqueeze(-1) * self.mean_direction

    @property
    def mean_resultant_length(self) -> Float[Tensor, "*batch"]:
        """A_n(kappa) = E[mu.z]."""
        return self._per_batch(self._at_kappa("mean_resultant_length"))

    @property
    def spherical_variance(self) -> Float[Tensor, "*batch"]:
        """1 - A_n(kappa), in (0, 1]."""
        return self._per_batch(self._at_kappa("spherical_variance"))

    @property
    def variance(self) -> Float[Tensor, "*batch dim"]:
        """Var[z_i] of each coordinate: A/kappa (1 - mu_i^2) + A' mu_i^2."""
        names = "mean_resultant_length", "spherical_variance", "cosine_variance"
        a, one_minus_a, da = map(self._at_kappa, names)
        across = (one_minus_a * (1 + a) - da) / (self.dim - 1)  # = A / kappa, also at kappa = 0
        squared = self.mean_direction**2
        across, da = (self._per_batch(x).unsqueeze(-1) for x in (across, da))
        return across * (1 - squared) + da * squared

    @property
    def log_normalizer(self) -> Float[Tensor, "*batch"]:
        """log C_n(kappa)."""
        return self._per_batch(self._at_kappa("log_normalizer"))

    @validates_inputs
    def log_prob(self, value: Float[Tensor, "*sample dim"]) -> Float[Tensor, "..."]:
        """Return the log density in nats with respect to the sphere's area."""
        # M(kappa) - kappa |z - mu|^2 / 2 equals log C + kappa mu.z on the sphere and has two more
        # correct digits in float32 at kappa = 16384. The gradient is that of the latter.
        value = promote_to_float32("value", value)
        if value.shape[-1:] != self._event_shape:
            shape = tuple(value.shape)
            raise ValueError(f"value must have a last axis of {self.dim}, got shape {shape}")
        if self._validate_args and can_check_values(value):
            self._validate_sample(value)
        with full_precision(value):
            mode = self._at_kappa("log_mode_density")
            return mode - self._kappa * _sag(value, self.mean_direction)

    def entropy(self) -> Float[Tensor, "*batch"]:
        """Return kappa (1 - A) - M, in nats, without the cancellation of -log C - kappa A."""
        spread = self._at_kappa("spherical_variance", wide=True)
        mode = self._at_kappa("log_mode_density", wide=True)
        return self._per_batch(_widened(self._kappa) * spread - mode)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Float[Tensor, "..."]:
        """Draw differentiable samples, from one standard normal number per coordinate."""
        shape = self._extended_shape(torch.Size(sample_shape))
        mu = self.mean_direction
        return self.from_noise(torch.randn(shape, dtype=mu.dtype, device=mu.device))

    def from_noise(self, noise: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the samples of `rsample` for given standard normals; overwrites `noise`."""
        mu = self.mean_direction.expand(noise.shape)
        with full_precision(mu):
            in_place = not in_func_transform()  # vmap cannot write into a tensor without its axis
            with torch.no_grad():
                along = (noise * mu).sum(-1, keepdim=True)
                tangent = noise.addcmul_(along, mu, value=-1) if in_place else noise - along * mu
                r = torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)
            cosine, scale, slope = self._turn(r)
            with torch.no_grad():
                if in_place:
                    z = tangent.mul_(scale).addcmul_(cosine, mu)
                else:
                    z = tangent * scale + cosine * mu
            if mu.requires_grad or slope is not None or not in_place:
                kappa = None if slope is None else self._kappa.expand(self._batch_shape)
                z = _Moving.apply(z, mu, kappa, cosine, slope)
                assert isinstance(z, Tensor)
            return z

    def _turn(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cos(theta), sin(theta) / r, and d log tan(theta/2) / d kappa if it is needed."""
        n, place = self.dim, float64_device(r.device)
        if self._fixed is not None:
            log_height = self._fixed.log_mode_density + special.log_area(n - 1)
            if (fit := _transport(n, self._kappa, log_height)) is not None:
                q = radial_polynomial.carry(fit, r)
                sag = r * r * q  # 1 - cos(theta)
                return 1 - sag, torch.sqrt(q * (2 - sag).clamp(min=0)), None
            cells = _fixed_cells(n, self._kappa, place)
            cosine, scale, slope = *vmf_sampler.turn_fixed(r, n, cells), None
        else:
            moves = self._kappa.requires_grad and torch.is_grad_enabled()
            moves = moves or in_func_transform()
            kappa = self._kappa.detach().unsqueeze(-1)
            if n == 3:
                found = vmf_sampler.turn_in_space(r, kappa, differentiate=moves)
            else:
                found = vmf_sampler.turn(r, n, kappa, _table_cells(n, place), differentiate=moves)
            cosine, scale, slope = found
        return cosine.to(r.dtype).to(r.device), scale.to(r.dtype).to(r.device), slope

    def _at_kappa(self, name: str, *, wide: bool = False) -> Any:
        """Evaluate a function of `special`, in float64 if `wide`; a float if kappa is a number."""
        if self._fixed is not None:
            return getattr(self._fixed, name)
        return getattr(special, name)(_widened(self._kappa) if wide else self._kappa, self.dim)

    def _wide(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return to_float64(value)
        mu = self.mean_direction
        return mu.new_full((), value, dtype=torch.float64, device=float64_device(mu.device))

    def _per_batch(self, value: float | Tensor) -> Tensor:
        """Expand to one value per distribution of the batch, in the distribution's dtype."""
        value = value if isinstance(value, Tensor) else self._wide(value)
        mu = self.mean_direction
        return value.to(mu.dtype).to(mu.device).expand(self._batch_shape)


class _Moving(Function):
    """z = cos(theta) mu + sin(theta) u, differentiable in mu and kappa."""

    # u follows mu by parallel transport: dz = cos(theta) dmu - (z.dmu) mu + (dz/dtheta) dtheta.
    # Other implementations use a reflection that maps the first axis to mu. It has the same
    # distribution and the same expected gradient, but its derivative diverges as mu approaches that
    # axis.

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor, mu: Tensor, kappa: Tensor | None, cosine: Tensor, slope: Tensor | None
    ) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        z, mu, kappa, cosine, slope = inputs
        ctx.like_kappa = None if kappa is None else (kappa.shape, kappa.dtype, kappa.device)
        ctx.save_for_backward(z, mu, cosine, slope)

    @staticmethod
    def backward(ctx, grad: Tensor):
        z, mu, cosine, slope = ctx.saved_tensors
        along = (grad * mu).sum(-1, keepdim=True)
        grad_mu = torch.addcmul(cosine * grad, along, z, value=-1)
        grad_kappa = None
        if ctx.like_kappa is not None and ctx.needs_input_grad[2]:
            # dz / d log tan(theta/2) = sin(theta) dz/dtheta = cos(theta) z - mu
            turn = cosine * (grad * z).sum(-1, keepdim=True) - along
            shape, dtype, device = ctx.like_kappa
            grad_kappa = (to_float64(turn) * slope).squeeze(-1).sum_to_size(shape)
            grad_kappa = differentiable_once(grad_kappa.to(dtype).to(device), _SAMPLES)
        return None, differentiable_once(grad_mu, _SAMPLES), grad_kappa, None, None


class _Sag(Function):
    """1 - u.v of unit vectors, as |u - v|^2 / 2, which is accurate if u is near v."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.linalg.vector_norm(u - v, dim=-1).square()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        u, v = ctx.saved_tensors
        grad = -grad.unsqueeze(-1)
        return (grad * v).sum_to_size(u.shape), (grad * u).sum_to_size(v.shape)


def _sag(u: Tensor, v: Tensor) -> Tensor:
    result = _Sag.apply(u, v)
    assert isinstance(result, Tensor)
    return result


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_vmf_vmf(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    """Return A_p (kappa_p - kappa_q mu_p.mu_q) + log C_p - log C_q."""
    # Computed as the value at equal means, in float64 and rounded once, plus the rest.
    same_dimension(p, q)
    m_p, m_q = (each._at_kappa("log_mode_density", wide=True) for each in (p, q))
    spread = p._at_kappa("spherical_variance", wide=True)
    floor = m_p - m_q - _widened(p._kappa - q._kappa) * spread
    apart = _sag(p.mean_direction, q.mean_direction)
    if isinstance(floor, Tensor):
        floor = floor.to(apart.dtype).to(apart.device)
    return floor + q._kappa * p._at_kappa("mean_resultant_length") * apart


def _widened(value: Any) -> Any:
    """Return a tensor in float64, and a number as it is."""
    return to_float64(value) if isinstance(value, Tensor) else value


@traced_as_constant
def _constants(kappa: float, n: int) -> special.Constants:
    return special.constants(kappa, n)


@traced_as_constant
def _table_cells(n: int, device: torch.device) -> Tensor:
    return vmf_sampler.table_cells(n, device)


@traced_as_constant
def _fixed_cells(n: int, kappa: float, device: torch.device) -> Tensor:
    return vmf_sampler.fixed_cells(n, kappa, device)


@traced_as_constant
def _transport(n: int, kappa: float, log_height: float) -> radial_polynomial.Transport | None:
    return radial_polynomial.transport(n, kappa, log_height)


def _broadcast_parameters(
    mean_direction: Tensor, concentration: Tensor
) -> tuple[torch.Size, Tensor, Tensor]:
    """Return the broadcast batch shape, and both parameters in a common dtype."""
    concentration = promote_to_float32("concentration", concentration)
    check_same_device("mean_direction", mean_direction, "concentration", concentration)
    batch_shape = mean_direction.shape[:-1]
    if concentration.shape != batch_shape:
        try:
            batch_shape = torch.broadcast_shapes(batch_shape, concentration.shape)
        except RuntimeError:
            rule = f"broadcast against the batch shape of mean_direction, {tuple(batch_shape)}"
            got = tuple(concentration.shape)
            raise ValueError(f"concentration must {rule}, got {got}") from None
    dtype = torch.promote_types(mean_direction.dtype, concentration.dtype)
    return batch_shape, mean_direction.to(dtype), concentration.to(dtype)


def same_dimension(p: Distribution, q: Distribution) -> None:
    """Raise ValueError if the distributions are on spheres of different dimension."""
    if p.event_shape != q.event_shape:
        got = f"dimensions {p.event_shape[0]} and {q.event_shape[0]}"
        raise ValueError(f"both distributions must be on the same sphere, got {got}")
