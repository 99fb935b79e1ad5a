"""What a training step is made of: a method with its probe, the views it sees, its optimizer."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from compressive import optim
from compressive.augment.ops import augment_pair
from compressive.augment.params import View, paper_views, simclr_views
from compressive.config import Config, Optim, Views
from compressive.data.loaders import Batch
from compressive.methods import Method, Step
from compressive.networks import feature_dim
from compressive.rng import image_keys
from compressive.train.online_eval import OnlineProbe

ViewMaker = Callable[[Batch], Sequence[Tensor]]


class Learner(nn.Module):
    """A method and, where images have labels, a probe that learns beside it."""

    def __init__(self, method: Method, classes: int) -> None:
        super().__init__()
        self.method = method
        self.probe = OnlineProbe(feature_dim(method.encoder), classes) if classes else None

    def forward(self, views: Sequence[Tensor], beta: Tensor, label: Tensor) -> tuple[Step, Tensor]:
        """Return the method's step, and the loss of the probe over all views."""
        step = self.method(views, beta)
        if self.probe is None:
            return step, torch.zeros_like(step.loss)
        return step, self.probe.loss(torch.cat(step.feats), torch.cat([label] * len(step.feats)))


@torch.no_grad()
def require_size(network: nn.Module, name: str, size: int) -> None:
    """Refuse a size of images that a network cannot take: some are cut into patches."""
    weight = next(network.parameters())
    was = network.training
    try:
        network.eval()(torch.zeros(2, 3, size, size, device=weight.device, dtype=weight.dtype))
    except (AssertionError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} takes no images of {size} pixels: {why}; choose another views.size"
        ) from None
    finally:
        network.train(was)


def recompute(network: nn.Module) -> None:
    """Let a compiled step keep this network's products alone; the rest is made again backward.

    Not for a step that is not compiled: its batch norms would count every batch twice.
    """
    contexts = partial(create_selective_checkpoint_contexts, _kept)
    # Its only warning is of operations in place, which a compiled step has none of by then.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    network.forward = partial(checkpoint, network.forward, use_reentrant=False, context_fn=contexts)


def _kept(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Products, which take long to make again, and random numbers, which would be others."""
    name = operation.name().removeprefix("aten::").partition(".")[0]
    is_product = name in {"convolution", "mm", "addmm", "bmm"} or "dot_product" in name
    if is_product or torch.Tag.nondeterministic_seeded in operation.tags:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def view_pair(settings: Views) -> tuple[View, View]:
    """How the two views are made."""
    pair = simclr_views(settings.strength) if settings.policy == "simclr" else paper_views()
    changes = {"crop_scale_min": settings.crop_scale_min, "antialias": settings.antialias}
    if not settings.blur:
        changes["blur"] = 0.0
    x, y = (replace(view, **changes) for view in pair)
    return x, y


def view_maker(config: Config, dtype: torch.dtype, *, compiled: bool) -> ViewMaker:
    """Two views of every image of a batch, on its device.

    With a network in bfloat16 the resizing products are in float16: three more bits than the
    network sees.
    """
    pair, size, seed = view_pair(config.views), config.views.size, config.seed
    products = torch.float32 if dtype == torch.float32 else torch.float16

    def views(
        images: Tensor, height: Tensor, width: Tensor, index: Tensor, epoch: Tensor
    ) -> tuple[Tensor, Tensor]:
        number = torch.arange(2, device=index.device).repeat_interleave(len(index))
        index, epoch = torch.cat([index, index]), torch.cat([epoch, epoch])
        keys = image_keys(index, seed=seed, epoch=epoch, view=number)
        sizes = {"height": height, "width": width}
        return augment_pair(images, keys, pair, size, **sizes, dtype=dtype, products=products)

    made = torch.compile(views, dynamic=False) if compiled else views

    @torch.no_grad()
    def make(batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = made(batch.images, batch.height, batch.width, batch.index, batch.epoch)
        return x, y

    return make


def optimizer(settings: Optim, method: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the method's weights; its learning rate is set before every step."""
    groups = optim.parameter_groups(method, weight_decay=settings.weight_decay)
    if settings.name == "lars":
        return optim.LARS(
            groups, 0.0, momentum=settings.momentum, trust_coefficient=settings.trust_coefficient
        )
    if settings.name == "sgd":
        return torch.optim.SGD(groups, 0.0, momentum=settings.momentum)
    return torch.optim.AdamW(groups, 0.0)
