"""Control beta so that the reducible residual reaches a target."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from compressive.checks import check_positive
from compressive.distributed import mean_value

# Range of beta. Below it the penalty is less than 0.02 nats, as good as 0. The upper end is far
# above the beta at which known runs collapse (2 for C-SimCLR on ImageNet, 20 in our smallest test).
LEAST, MOST = 1e-3, 100.0

# Proportional gain. It compensates for the lag of the response and of the smoothing: without it,
# beta overshoots and oscillates.
_AT_ONCE = 0.3


class Controller:
    """PI controller that raises beta while the reducible residual is above the target.

    It controls log beta by the error log(residual / target), clipped at a factor of e: ratios of
    both matter, not differences. The integral part is needed because the right beta is unknown and
    drifts as the network learns. It is clipped to the range of beta, so an unreachable target does
    not cause an overshoot later.

    `horizon`, in steps, sets the gain: an error of a factor of e changes beta by a factor of e in
    that time. The residual is averaged over a tenth of it. In simulations beta does not oscillate
    if the network follows beta within a quarter of the horizon and the elasticity
    d log residual / d log beta is at most 3.5 in size. On a small C-SimCLR problem the network
    follows within 20 steps. Its elasticity is 0.05 at beta = 0.1, 0.3 at 2, 1 at 7 and 2.4 at 15,
    above which it collapses. An error decays in about horizon / elasticity steps.

    The state consists of 0-dim tensors on the device, so nothing waits for the device.
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
        """Update beta with the reducible residual of a step, the mean over this process's images.

        `beta` becomes a new tensor, so a pending backward pass keeps the old one. A value that is
        not finite counts as on target: `Health` detects failures.
        """
        on_target = {name: self._target for name in ("nan", "posinf", "neginf")}
        nats = mean_value(reducible_residual.detach().float()).nan_to_num(**on_target)
        share = min(1.0, 10 / self._horizon)
        self._sum = self._sum + share * (nats - self._sum)
        self._weight = self._weight + share * (1 - self._weight)  # corrects the initial bias
        error = (self._sum / self._weight / self._target).log().clamp(-1, 1)
        ends = math.log(LEAST), math.log(MOST)
        self._integral = (self._integral + error / self._horizon).clamp(*ends)
        self.beta = (self._integral + _AT_ONCE * error).clamp(*ends).exp()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that later values of beta depend on."""
        return {
            "beta": self.beta,
            "integral": self._integral,
            "sum": self._sum,
            "weight": self._weight,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state on this controller's device."""
        device = self.beta.device
        self.beta = state["beta"].to(device)
        self._integral = state["integral"].to(device)
        self._sum, self._weight = state["sum"].to(device), state["weight"].to(device)
