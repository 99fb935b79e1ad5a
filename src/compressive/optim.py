"""The optimizer of the paper, the parameters it spares, and its schedules: step -> value."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

__all__ = ["LARS", "cosine_beta", "ema_decay", "linear_beta", "parameter_groups", "scaled_lr"]
__all__ += ["warmup_cosine", "warmup_steps"]

# Elements between two entries of a block's scale. 512 keeps every view aligned for vector loads,
# makes the scale 1/512 of the traffic, and wastes 0.001 % of ResNet-50's adapted weights.
CHUNK = 512

_Key = tuple[int, torch.device, torch.dtype]  # group, and what tensors must share to be fused


class LARS(torch.optim.Optimizer):
    """Momentum SGD whose every layer moves in proportion to the norm of its own weights.

    The form of SimCLR and of the paper's code, with the learning rate inside the momentum:

        g <- g + weight_decay * w
        v <- momentum * v + lr * r * g,    r = trust * |w| / |g|,  or 1 where either norm is 0
        w <- w - v

    Others (BYOL's, timm's, lightly's) subtract lr * v, which differs whenever lr changes. A group
    with `adapt=False` has neither decay nor r. `parameter_groups` makes the paper's groups.

    A step never waits for the device: 30 kernels for ResNet-50 with heads, where a loop over its
    tensors launches 1,241 (H200). It holds one more copy of the weights than SGD, and its momenta
    are views into one block. A parameter without a gradient keeps its value and momentum; whenever
    the set of such parameters changes, the momenta are copied once.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        self._blocks: dict[_Key, _Block] = {}
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "trust_coefficient": trust_coefficient, "adapt": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._blocks = {}  # not part of torch's pickled state, so a deep copy arrives without

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters too, with these options and the defaults of the others."""
        group = {**self.defaults, **param_group}
        if not group["adapt"]:
            group["weight_decay"] = param_group.get("weight_decay", 0.0)
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        trust = group["trust_coefficient"]
        _require(0 <= lr < math.inf, "lr", lr, "finite and 0 or more")
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        _require(0 <= decay < math.inf, "weight_decay", decay, "finite and 0 or more")
        _require(group["adapt"] or decay == 0, "weight_decay", decay, "0 where adapt=False")
        _require(0 < trust < math.inf, "trust_coefficient", trust, "finite and positive")
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; return what `closure`, if any, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alike: defaultdict[_Key, list[Tensor]] = defaultdict(list)
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout != torch.strided:
                    raise ValueError(f"LARS needs dense gradients, got one of {p.grad.layout}")
                alike[index, p.device, p.dtype].append(p)
        for key, params in alike.items():
            _update(params, self._block(key, params), self.param_groups[key[0]])
        return loss

    def _block(self, key: _Key, params: list[Tensor]) -> "_Block":
        """The block that holds the momenta of exactly these parameters."""
        held = [self.state[p].get("momentum_buffer") for p in params]
        block = self._blocks.get(key)
        # Identity: loading a state, or a gradient that comes or goes, puts other tensors here.
        if block is None or list(map(id, held)) != list(map(id, block.momenta)):
            block = self._blocks[key] = _Block(params, held)
            for p, momentum in zip(params, block.momenta, strict=True):
                self.state[p]["momentum_buffer"] = momentum
        return block


class _Block:
    """Momenta and updates of some parameters, each in one tensor of (chunks, CHUNK)."""

    # A parameter fills whole chunks, so a scale per parameter is one column of the block. The
    # obvious `torch._foreach_mul_(updates, scales)` launches one kernel per tensor when the scales
    # are tensors, and waits for the device when they are numbers.

    def __init__(self, params: list[Tensor], momenta: list[Tensor | None]) -> None:
        chunks = [-(-p.numel() // CHUNK) for p in params]
        owner = torch.arange(len(params)).repeat_interleave(torch.tensor(chunks))
        self.owner = owner.unsqueeze(1).to(params[0].device)  # chunk -> parameter
        self.momentum = params[0].new_zeros(sum(chunks), CHUNK)
        self.update = torch.zeros_like(self.momentum)

        def views(block: Tensor) -> list[Tensor]:
            # The parameter's own strides, since torch fuses lists only where strides agree:
            # `empty_like` copies those of a dense tensor and makes dense ones for any other.
            strides = [torch.empty_like(p, device="meta").stride() for p in params]
            parts = zip(block.split(chunks), params, strides, strict=True)
            return [part.as_strided(p.shape, stride) for part, p, stride in parts]

        self.momenta, self.updates = views(self.momentum), views(self.update)
        for new, old in zip(self.momenta, momenta, strict=True):
            if old is not None:
                new.copy_(old)


def _update(params: list[Tensor], block: _Block, group: dict[str, Any]) -> None:
    """One step of one group; torch documents the `_foreach` functions, underscore and all."""
    torch._foreach_copy_(block.updates, [p.grad for p in params if p.grad is not None])
    scale = group["lr"]
    if group["adapt"]:
        torch._foreach_add_(block.updates, params, alpha=group["weight_decay"])
        w, g = torch.stack(torch._foreach_norm([*params, *block.updates])).view(2, -1)
        ratio = torch.where((w > 0) & (g > 0), group["trust_coefficient"] * w / g, 1.0)
        scale = (scale * ratio)[block.owner]
    block.update.mul_(scale)
    torch.add(block.update, block.momentum, alpha=group["momentum"], out=block.momentum)
    torch._foreach_sub_(params, block.momenta)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, exclude: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the weights to adapt and decay, then those the paper excludes: biases and batch norms.

    Excluded is what has at most one axis, or a string of `exclude` in its name, as the supervised
    head has in the paper. Frozen parameters are in neither. torch's own optimizers ignore `adapt`.
    """
    if isinstance(exclude, str):
        raise ValueError(f"exclude must be a sequence of strings, got the string {exclude!r}")
    adapted, spared = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            spare = p.ndim <= 1 or any(part in name for part in exclude)
            (spared if spare else adapted).append(p)
    return [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True},
        {"params": spared, "weight_decay": 0.0, "adapt": False},
    ]


def warmup_steps(examples: int, epochs: float, batch: int) -> int:
    """Steps of the linear warm-up, whose epochs need not be whole."""
    _require(batch > 0, "batch", batch, "positive")
    return round(epochs * examples // batch)


def scaled_lr(base: float, batch: int) -> float:
    """The peak learning rate for this batch, where `base` is the one for 256 images."""
    return base * batch / 256


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """The learning rate: a line from 0 to `peak`, then half a cosine to 0 at `total`."""
    _require(step >= 0, "step", step, "0 or more")
    _require(0 <= warmup < total, "warmup", warmup, f"in [0, total), with total = {total}")
    if step < warmup:
        return peak * step / warmup
    return peak * _fall(step - warmup, total - warmup)


def ema_decay(step: int, *, base: float, total: int) -> float:
    """Return how much of itself the target keeps in a step: from `base` up to 1 at `total`."""
    # The official code counts the steps before the optimizer's, and averages after it.
    _require(0 <= base <= 1, "base", base, "from 0 to 1")
    return 1 - (1 - base) * _fall(step, total)


def linear_beta(step: int, *, beta: float, warmup: int) -> float:
    """Return the weight of the residual: linear from 0 to `beta` at `warmup`, then `beta`."""
    _require(step >= 0, "step", step, "0 or more")
    _require(0 <= beta < math.inf, "beta", beta, "finite and 0 or more")
    return beta * step / warmup if step < warmup else beta


def cosine_beta(step: int, *, beta: float, total: int) -> float:
    """Return the weight of the residual: half a cosine from 0 to `beta` at `total`."""
    return beta * (1 - _fall(step, total))


def _fall(step: int, total: int) -> float:
    """Half a cosine from 1 at step 0 to 0 at `total`, then 0."""
    _require(step >= 0, "step", step, "0 or more")
    _require(total > 0, "total", total, "positive")
    return 0.5 * (1 + math.cos(math.pi * min(step, total) / total))


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Refuse a number at the door, in words."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value}")
