"""The parts of a training step: a method with its online probe, its views and its optimizer."""

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
from compressive.augment.ops import Channels, augment, augment_pair
from compressive.augment.params import View, crop_views, paper_views, simclr_views
from compressive.config import Config, Optim, Views, channels
from compressive.data.loaders import Batch
from compressive.distributed import is_sharded, world_size
from compressive.methods import Builder, Method, Step
from compressive.networks import feature_dim
from compressive.rng import image_keys
from compressive.sync_batchnorm import synchronize
from compressive.train.arm_convolutions import speed_up_convolutions
from compressive.train.compile_cache import start_compile_workers, use_compile_cache
from compressive.train.drop_path import share_drop_path
from compressive.train.norm_kernels import fuse_norms
from compressive.train.online_eval import OnlineProbe

ViewMaker = Callable[[Batch], Sequence[Tensor]]


class Learner(nn.Module):
    """A method and, if images have labels, a linear probe trained on its detached features.

    A supervised method gets the labels itself and has no probe.
    """

    def __init__(self, method: Method, classes: int) -> None:
        super().__init__()
        self.method = method
        has_probe = classes and not method.is_supervised
        self.probe: OnlineProbe | None = None
        if has_probe:
            self.probe = OnlineProbe(feature_dim(method.encoder), classes)

    def forward(self, views: Sequence[Tensor], beta: Tensor, label: Tensor) -> tuple[Step, Tensor]:
        """Return the method's step, and the loss of the probe over all views."""
        if self.method.is_supervised:
            step = self.method(views, beta, label)
        else:
            step = self.method(views, beta)
        if self.probe is None:
            return step, torch.zeros_like(step.loss)
        return step, self.probe.loss(torch.cat(step.feats), torch.cat([label] * len(step.feats)))


def build_learner(
    config: Config, method: Builder, classes: int, device: torch.device, *, compiled: bool
) -> Learner:
    """Build the method and its probe on a device, with the same weights in every process."""
    if config.train.activation_checkpointing and (not compiled or world_size() > 1):
        raise ValueError(
            "train.activation_checkpointing=true needs compiled steps (train.compile=yes) and a "
            "single process"
        )
    torch.manual_seed(config.seed)
    learner = Learner(method(config), classes)
    learner.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if not compiled:
        speed_up_convolutions(learner, device)
    check_view_size(learner.method.encoder, config.network.name, config.views.size)
    train = config.train
    synchronize(learner, ranks=train.batch_norm_ranks)
    fuse_norms(learner, config, device, compiled=compiled)
    share_drop_path(learner, train.batch_size // train.grad_accum_steps // world_size())
    return learner


def compile_learner(learner: Learner, config: Config, device: torch.device) -> None:
    """Compile the step; with several processes only the backbone, which has no collectives."""
    use_compile_cache(device)
    start_compile_workers(device)
    if config.train.activation_checkpointing:
        checkpoint_activations(learner.method.encoder)
    if world_size() > 1:
        if not is_sharded(learner):  # FSDP2 with compiled blocks has not been tested
            learner.method.encoder.compile(dynamic=False)
        return
    # Use CUDA graphs: launching BYOL's kernels takes longer than running them (ResNet-18, H200:
    # 28 and 19 ms). Graphs overwrite gradients, so they exclude gradient accumulation.
    graphs = device.type == "cuda" and config.train.grad_accum_steps == 1
    learner.compile(dynamic=False, mode="reduce-overhead" if graphs else "default")


@torch.no_grad()
def check_view_size(network: nn.Module, name: str, size: int) -> None:
    """Raise ValueError if a network, for example a patch-based one, rejects this image size."""
    weight = next(network.parameters())
    was = network.training
    try:
        network.eval()(torch.zeros(2, 3, size, size, device=weight.device, dtype=weight.dtype))
    except (AssertionError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} does not accept images of {size} pixels: {why}; choose another views.size"
        ) from None
    finally:
        network.train(was)


def checkpoint_activations(network: nn.Module) -> None:
    """Save only this network's matrix products; recompute the rest in the backward pass.

    Use it only for compiled steps: otherwise batch norms would count every batch twice.
    """
    contexts = partial(create_selective_checkpoint_contexts, _checkpoint_policy)
    # Its only warning is about in-place operations, which compilation removes.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    network.forward = partial(checkpoint, network.forward, use_reentrant=False, context_fn=contexts)


def _checkpoint_policy(
    context: Any, operation: Any, *args: Any, **options: Any
) -> CheckpointPolicy:
    """Save products, which are slow to recompute, and random numbers, which would differ."""
    name = operation.name().removeprefix("aten::").partition(".")[0]
    is_product = name in {"convolution", "mm", "addmm", "bmm"} or "dot_product" in name
    if is_product or torch.Tag.nondeterministic_seeded in operation.tags:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def view_channels(settings: Views) -> Channels:
    """Return the mean and standard deviation that views are normalized with."""
    return Channels(
        mean=channels(settings.mean, "views.mean"), std=channels(settings.std, "views.std")
    )


def view_pair(settings: Views) -> tuple[View, View]:
    """Return the augmentation parameters of the two views."""
    if settings.policy == "simclr":
        pair = simclr_views(settings.strength)
    else:
        pair = crop_views() if settings.policy == "crop" else paper_views()
    changes = {"crop_scale_min": settings.crop_scale_min, "antialias": settings.antialias}
    if not settings.blur:
        changes["blur"] = 0.0
    x, y = (replace(view, **changes) for view in pair)
    return x, y


def view_maker(
    config: Config, dtype: torch.dtype, numbers: Sequence[int] = (0, 1), *, compiled: bool
) -> ViewMaker:
    """Return a function that makes one or two views of every image of a batch, on its device.

    `numbers` are those of the views: another number gives another random view of an image. With a
    bfloat16 network the matrix products of resizing are float16, which has three more bits of
    precision.
    """
    pair, size, seed = view_pair(config.views), config.views.size, config.seed
    channels = view_channels(config.views)
    products = torch.float32 if dtype == torch.float32 else torch.float16

    def views(
        images: Tensor, height: Tensor, width: Tensor, index: Tensor, epoch: Tensor
    ) -> tuple[Tensor, ...]:
        sizes = {"height": height, "width": width}
        if len(numbers) == 1:
            keys = image_keys(index, seed=seed, epoch=epoch, view=numbers[0])
            x = augment(images, keys, pair[0], size, **sizes, dtype=dtype, products=products)
            return (x,)
        first, last = numbers  # consecutive; a tensor of a list would wait for the device
        number = torch.arange(first, last + 1, device=index.device).repeat_interleave(len(index))
        index, epoch = torch.cat([index, index]), torch.cat([epoch, epoch])
        keys = image_keys(index, seed=seed, epoch=epoch, view=number)
        kinds = {"dtype": dtype, "products": products, "channels": channels}
        return augment_pair(images, keys, pair, size, **sizes, **kinds)

    # Triton shortens the names of files to 150 characters. Kernels with longer names, which list
    # their operations, are not found in the cache, and building them takes 2 s at each start.
    short: dict[str, Any] = {"triton.descriptive_names": ""}
    made = torch.compile(views, dynamic=False, options=short) if compiled else views

    @torch.no_grad()
    def make(batch: Batch) -> tuple[Tensor, ...]:
        return made(batch.images, batch.height, batch.width, batch.index, batch.epoch)

    return make


def build_optimizer(
    settings: Optim, method: nn.Module, *, frozen: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of the method's weights; the loop sets its learning rate."""
    groups = optim.parameter_groups(method, weight_decay=settings.weight_decay)
    if frozen or settings.layer_decay < 1:
        groups = optim.layer_groups(
            method, weight_decay=settings.weight_decay, layer_decay=settings.layer_decay
        )
    if settings.name == "lars":
        return optim.LARS(
            groups, 0.0, momentum=settings.momentum, trust_coefficient=settings.trust_coefficient
        )
    if settings.name == "sgd":
        momentum, nesterov = settings.momentum, settings.nesterov
        return torch.optim.SGD(groups, 0.0, momentum=momentum, nesterov=nesterov)
    return torch.optim.AdamW(groups, 0.0)


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the strides of their weights: torch fuses a step only if these agree."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == p.shape
            if is_moment and value.stride() != p.stride():
                state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
