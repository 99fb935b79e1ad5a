"""LARS, its parameter groups, and schedules as functions of the step."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from compressive.distributed import all_sum, local_shard, shard_like

__all__ = ["LARS", "cosine_beta", "ema_decay", "layer_groups", "linear_beta"]
__all__ += ["parameter_groups", "scaled_lr"]
__all__ += ["warmup_cosine", "warmup_steps"]

# Elements per chunk; each chunk has one scale. 512 keeps every view aligned for vector loads, makes
# the scales 1/512 of the memory traffic, and pads ResNet-50's adapted weights by 0.001 %.
CHUNK = 512

_Key = tuple[int, torch.device, torch.dtype]  # group index, device, dtype


class LARS(torch.optim.Optimizer):
    """Momentum SGD that scales each layer's update by the norm of its weights.

    This is the form of SimCLR and of the paper's code, with the learning rate inside the momentum:

        g <- g + weight_decay * w
        v <- momentum * v + lr * r * g,    r = trust * |w| / |g|,  or 1 if either norm is 0
        w <- w - v

    BYOL, timm and lightly subtract lr * v instead, which differs whenever lr changes. A group with
    `adapt=False` has neither weight decay nor r. `parameter_groups` makes the paper's groups.

    A step never waits for the device. It launches 30 kernels for ResNet-50 with heads, where a loop
    over its tensors launches 1,241 (H200). It needs memory for one more copy of the weights than
    SGD, and its momenta are views into one block. A parameter without a gradient keeps its value
    and momentum. When the set of such parameters changes, the momenta are copied once. Norms of
    sharded parameters (FSDP2) are those of whole tensors: one sum over processes for each group.
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
        self._blocks = {}  # torch does not pickle or copy it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options; the optimizer's defaults fill in missing ones."""
        group = {**self.defaults, **param_group}
        if not group["adapt"]:
            group["weight_decay"] = param_group.get("weight_decay", 0.0)
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        trust = group["trust_coefficient"]
        _require(0 <= lr < math.inf, "lr", lr, "finite and 0 or more")
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        _require(0 <= decay < math.inf, "weight_decay", decay, "finite and 0 or more")
        _require(group["adapt"] or decay == 0, "weight_decay", decay, "0 with adapt=False")
        _require(0 < trust < math.inf, "trust_coefficient", trust, "finite and positive")
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`, if given."""
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
        """Return the block with the momenta of exactly these parameters."""
        held = [self.state[p].get("momentum_buffer") for p in params]
        block = self._blocks.get(key)
        # Compare identities: loading a state or another set of gradients gives other tensors.
        if block is None or list(map(id, held)) != list(map(id, block.held)):
            block = self._blocks[key] = _Block(params, held)
            for p, momentum in zip(params, block.held, strict=True):
                self.state[p]["momentum_buffer"] = momentum
        return block


class _Block:
    """Momenta and updates of several parameters, each in one tensor of (chunks, CHUNK)."""

    # A parameter fills whole chunks, so one scale per chunk scales every parameter by its own. The
    # simpler `torch._foreach_mul_(updates, scales)` launches one kernel per tensor if the scales
    # are tensors, and waits for the device if they are numbers.

    def __init__(self, whole: list[Tensor], momenta: list[Tensor | None]) -> None:
        params = [local_shard(p) for p in whole]
        chunks = [-(-p.numel() // CHUNK) for p in params]
        owner = torch.arange(len(params)).repeat_interleave(torch.tensor(chunks))
        self.owner = owner.unsqueeze(1).to(params[0].device)  # chunk -> parameter
        self.momentum = params[0].new_zeros(sum(chunks), CHUNK)
        self.update = torch.zeros_like(self.momentum)

        def views(block: Tensor) -> list[Tensor]:
            # Use the parameter's strides: torch fuses lists only if strides agree. `empty_like`
            # copies the strides of a dense tensor and gives any other dense strides.
            strides = [torch.empty_like(p, device="meta").stride() for p in params]
            parts = zip(block.split(chunks), params, strides, strict=True)
            return [part.as_strided(p.shape, stride) for part, p, stride in parts]

        self.momenta, self.updates = views(self.momentum), views(self.update)
        for new, old in zip(self.momenta, momenta, strict=True):
            if old is not None:
                new.copy_(local_shard(old))
        self.held = [shard_like(m, p) for m, p in zip(self.momenta, whole, strict=True)]
        self.is_sharded: bool = whole[0] is not params[0]


def _update(params: list[Tensor], block: _Block, group: dict[str, Any]) -> None:
    """Make one step of one group; torch documents the `_foreach` functions it uses."""
    torch._foreach_copy_(block.updates, [local_shard(p.grad) for p in params if p.grad is not None])
    params = [local_shard(p) for p in params]
    scale = group["lr"]
    if group["adapt"]:
        torch._foreach_add_(block.updates, params, alpha=group["weight_decay"])
        norms = torch.stack(torch._foreach_norm([*params, *block.updates]))
        if block.is_sharded:
            norms = all_sum(norms.square()).sqrt()
        w, g = norms.view(2, -1)
        ratio = torch.where((w > 0) & (g > 0), group["trust_coefficient"] * w / g, 1.0)
        scale = (scale * ratio)[block.owner]
    block.update.mul_(scale)
    torch.add(block.update, block.momentum, alpha=group["momentum"], out=block.momentum)
    torch._foreach_sub_(params, block.momenta)


def parameter_groups(
    model: nn.Module, *, weight_decay: float, exclude: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a group with adaptation and weight decay, and one without: biases and batch norms.

    The second group has the parameters with at most one axis or with a string of `exclude` in the
    name, such as the supervised head in the paper. Frozen parameters are in neither group. torch's
    own optimizers ignore `adapt`.
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


def layer_groups(
    method: nn.Module, *, weight_decay: float, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Return groups as `parameter_groups`, for each block of `method.encoder` and for the rest.

    The groups of the encoder have `is_encoder`, and every group has `lr_scale`, which the training
    loop multiplies the learning rate with. It is `layer_decay` to the power of the number of blocks
    after this one, with the heads as the last, as in timm's param_groups_layer_decay.
    """
    scales = _layer_scales(method.get_submodule("encoder"), layer_decay)
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, p in method.named_parameters():
        if p.requires_grad:
            inside = name.removeprefix("encoder.") if name.startswith("encoder.") else ""
            key = bool(inside), scales.get(inside, 1.0), p.ndim > 1
            groups.setdefault(key, []).append(p)
    return [
        {
            "params": params,
            "weight_decay": weight_decay if adapt else 0.0,
            "adapt": adapt,
            "lr_scale": scale,
            "is_encoder": is_encoder,
        }
        for (is_encoder, scale, adapt), params in sorted(groups.items(), key=lambda each: each[0])
    ]


def _layer_scales(encoder: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of each weight of an encoder."""
    names = [name for name, _ in encoder.named_parameters()]
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    from timm.models import group_parameters  # import here: it takes seconds

    matcher = getattr(encoder, "group_matcher", None)
    if matcher is None:
        kind = type(encoder).__name__
        raise ValueError(f"optim.layer_decay must be 1 for {kind}, which names no blocks")

    class WithHead(nn.Module):
        # A head after the encoder is the last layer, as in timm's classifiers.
        def named_parameters(self, *_: Any, **__: Any) -> Any:
            return [*encoder.named_parameters(), ("head_of_the_method", None)]

    layers: Any = group_parameters(WithHead(), matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: decay ** (last - layers[name]) for name in names}


def warmup_steps(examples: int, epochs: float, batch: int) -> int:
    """Return the steps of a warm-up of `epochs` epochs, which may be a fraction."""
    _require(batch > 0, "batch", batch, "positive")
    return round(epochs * examples // batch)


def scaled_lr(base: float, batch: int) -> float:
    """Return the peak learning rate for a batch size; `base` is that for 256 images."""
    return base * batch / 256


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Return the learning rate: linear from 0 to `peak`, then half a cosine to 0 at `total`."""
    _require(step >= 0, "step", step, "0 or more")
    _require(0 <= warmup < total, "warmup", warmup, f"in [0, total), with total = {total}")
    if step < warmup:
        return peak * step / warmup
    return peak * _fall(step - warmup, total - warmup)


def ema_decay(step: int, *, base: float, total: int) -> float:
    """Return the EMA decay of the target: half a cosine from `base` to 1 at `total`."""
    # As in the official code, `step` is the number before the optimizer step; averaging is after.
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
    """Return half a cosine from 1 at step 0 to 0 at `total`, then 0."""
    _require(step >= 0, "step", step, "0 or more")
    _require(total > 0, "total", total, "positive")
    return 0.5 * (1 + math.cos(math.pi * min(step, total) / total))


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value}")
