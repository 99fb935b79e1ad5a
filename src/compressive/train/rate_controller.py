"""Compression as a dial: the price of a nat that makes a representation keep a given number."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.checks import check_positive
from compressive.distributed import mean_value

# What beta may become. Below, it costs less than 0.02 nats and is as good as 0; the upper end is
# far beyond the collapse of any run we know (2 for C-SimCLR on ImageNet, 20 in our smallest test).
LEAST, MOST = 1e-3, 100.0

# How much of an error acts at once, in place of by and by. It answers the lag of the response
# and of the smoothing: without it, beta overshoots and swings.
_AT_ONCE = 0.3


class Controller:
    """Raises beta while more reducible nats pass than the target, lowers it while fewer do.

    Proportional and integral control of log beta by the error log(reducible / target), cut at
    a factor of e: prices and nats both matter by their ratios. Integral, since the beta that
    belongs to a target is unknown and drifts as the network learns; it stops at the ends of the
    range, so a target out of reach is not made up for later.

    `horizon` is the one gain, in steps: an error of a factor of e changes beta by a factor of e
    in that time, and reducible nats are averaged over a tenth of it. In simulations no swing is
    left where a network follows beta within a quarter of the horizon and the elasticity of its
    nats, d log nats / d log beta, is at most 3.5. On a small C-SimCLR problem the first is 20
    steps, the second 0.05 at beta = 0.1, 0.3 at 2, 1 at 7 and 2.4 at 15, above which it collapses.
    An error dies out in about horizon / elasticity steps.

    All of it stays on the device as 0-dim tensors: nothing waits.
    """

    def __init__(
        self,
        target: float,
        *,
        beta: float = 1.0,
        horizon: int = 200,
        device: torch.device | str = "cpu",
    ) -> None:
        check_positive(target=target, horizon=horizon)
        self._target, self._horizon = target, horizon
        start = min(max(beta, LEAST), MOST)
        self.beta: Float[Tensor, ""] = torch.full((), start, device=device)
        self._integral = torch.full((), math.log(start), device=device)
        self._sum = torch.zeros((), device=device)
        self._weight = torch.zeros((), device=device)

    @torch.no_grad()
    def update(self, reducible_residual: Float[Tensor, ""]) -> None:
        """Take in the reducible nats of a step, this process's mean over its images.

        `beta` is a new tensor afterwards, so a backward pass still to come is not disturbed. A
        value that is not finite counts as on target; whether the run is ill is not judged here.
        """
        on_target = {name: self._target for name in ("nan", "posinf", "neginf")}
        nats = mean_value(reducible_residual.detach().float()).nan_to_num(**on_target)
        share = min(1.0, 10 / self._horizon)
        self._sum = self._sum + share * (nats - self._sum)
        self._weight = self._weight + share * (1 - self._weight)  # else the first steps count less
        error = (self._sum / self._weight / self._target).log().clamp(-1, 1)
        ends = math.log(LEAST), math.log(MOST)
        self._integral = (self._integral + error / self._horizon).clamp(*ends)
        self.beta = (self._integral + _AT_ONCE * error).clamp(*ends).exp()

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next betas depend on."""
        return {
            "beta": self.beta,
            "integral": self._integral,
            "sum": self._sum,
            "weight": self._weight,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on as if never interrupted."""
        device = self.beta.device
        self.beta = state["beta"].to(device)
        self._integral = state["integral"].to(device)
        self._sum, self._weight = state["sum"].to(device), state["weight"].to(device)
