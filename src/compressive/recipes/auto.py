"""Choose settings for a folder of images from its size and the available memory."""

import math
from collections.abc import Mapping
from typing import Any

from compressive.config import RESNETS
from compressive.recipes.adamw import optimizer_settings
from compressive.recipes.continued import continued, from_weights
from compressive.recipes.recipe import Recipe, SettingSources, Variant, make_recipe
from compressive.recipes.small_batch import METHOD_SETTINGS, SMALL_BATCH, view_settings

AUTO = "folder"  # the name of recipes made here
_PAPER_BETA = ("bottleneck.beta=1", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=10")


def auto_recipe(
    count: int,
    side: int,
    *,
    memory: float = 0.0,
    given: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return a first recipe for `count` images with a median shorter side of `side` pixels.

    `memory` is the GPU memory of all processes in GiB, or 0 without a GPU. `given` are settings
    that the user chose, by dotted name; the others follow from them. `weights` are the settings
    that the weights determine which the run starts from; {} or None: it starts from scratch.
    """
    if count < 2:
        raise ValueError(f"count must be 2 images or more, got {count}")
    if side < 1 or not 0 <= memory < math.inf:
        raise ValueError(f"side must be 1 or more and memory 0 or more, got {side} and {memory}")
    has_gpu, weights = memory > 0, weights or {}
    given = {**weights, **(given or {})}
    size = given.get("views.size") or _view_size(side, has_gpu)
    views = view_settings(size, has_gpu)
    if given.get("network.name", "resnet18") not in RESNETS:
        views["network.stem"] = ("imagenet", "the only stem of this network")
    stem = given.get("network.stem", views["network.stem"][0]) == "cifar"
    # ResNet-50 for many large images if 128 of them fit in memory.
    fits = has_gpu and _images_that_fit("resnet50", size, stem, memory) >= 128
    network = "resnet50" if count >= 50_000 and size > 64 and fits else "resnet18"
    network = given.get("network.name", network)
    epochs = given.get("train.epochs") or _epochs(count, has_gpu)
    have = f"{count:,} images of {side} pixels and " + (f"{memory:g} GiB" if has_gpu else "no GPU")
    warmup = min(10.0, epochs / 10)
    method = given.get("method", "c-simclr")
    optimizer = METHOD_SETTINGS.get(method, {}) | optimizer_settings(network)
    layer: SettingSources = {
        "network.name": (network, f"ours, for {have}"),
        "train.batch_size": (_batch(count, network, size, stem, memory), f"ours, for {have}"),
        "train.epochs": (epochs, f"ours, for {have}"),
        "optim.warmup_epochs": (warmup, "official code; at most 10 % of the run"),
        "probe.neighbors": (min(20, max(1, count // 10)), "default; at most 10 % of the images"),
    }
    has_own = given.get("bottleneck.schedule", "adaptive") != "adaptive"
    has_own |= given.get("bottleneck.target_residual") is not None
    if method == "c-simclr" and not has_own:
        batch = given.get("train.batch_size") or layer["train.batch_size"][0]
        layer |= _adaptive(batch, warmup)
    loads = "which timm cannot load because of its small stem" if stem else "which timm can load"
    paper_beta = Variant(_PAPER_BETA, "the paper's beta, with a linear warm-up")
    if weights:
        layer |= continued((SMALL_BATCH | optimizer)["optim.lr"][0], network, epochs)
    return make_recipe(
        AUTO,
        method,
        *(SMALL_BATCH, optimizer, views, layer, from_weights(weights)),
        about=f"Ours, for {have}: a {network}, {loads}.",
        expected="unknown for these images",
        hardware="GPU" if has_gpu else "CPU",
        needs="gpu" if has_gpu else "cpu",
        variants=(paper_beta,) if method == "c-simclr" else (),
    )


def _adaptive(batch: int, warmup: float) -> SettingSources:
    """Return the adaptive settings that lost no significant accuracy on two data sets."""
    # At batch 512, kappa_b 7 with beta 3 does not differ significantly in accuracy from SimCLR at
    # its best temperature on CIFAR-10 and Tiny-ImageNet-100, and is smoother (three seeds). Kappa_b
    # 5 is 1.2 points less accurate on Tiny-ImageNet-100. The probability of the positive, which
    # multiplies beta, is larger in small batches: on the built-in images, at batch 32, beta 3 is 4
    # points worse than 1 after two epochs and 0.5 better after 15. The limit of 256 lies between
    # these batch sizes and was not measured.
    beta = 3.0 if batch >= 256 else 1.0
    return {
        "bottleneck.schedule": ("adaptive", "ours: a constant beta can cost accuracy on hard data"),
        "bottleneck.kappa_b": (7.0, "ours: no significant loss on two data sets, and smoother"),
        "bottleneck.beta": (beta, "ours: smoother than with a smaller beta, and as accurate"),
        "bottleneck.warmup_epochs": (warmup, "ours, as long as that of the learning rate"),
    }


def _view_size(side: int, has_gpu: bool) -> int:
    """Return a view size close to that of the images; larger views would only take more time."""
    upto = {32: 40, 64: 80, 96: 112, 128: 192}
    size = next((size for size, most in upto.items() if side <= most), 224)
    return size if has_gpu else min(size, 96)  # on a CPU 224 takes five times as long


def _batch(count: int, network: str, size: int, small_stem: bool, memory: float) -> int:
    """Return a power of two, at most 512, that gives two steps per epoch or more."""
    # Larger is no better on CIFAR-10 (dkobak), and up to 512 SGD suffices instead of LARS.
    most = min(512, _images_that_fit(network, size, small_stem, memory)) if memory > 0 else 128
    return 2 ** int(math.log2(max(2, min(most, count // 2))))


def _images_that_fit(network: str, size: int, small_stem: bool, memory: float) -> int:
    """Return how many images, with two views each, fit into half of the memory.

    The other half is for the data.
    """
    # 512 views of 224 pixels take 22 GB with ResNet-50 in bf16 (measured on an H200). ResNet-18 has
    # 0.22 times its activations. The cifar stem has the activations of four times the side.
    area = (size * (4 if small_stem else 1) / 224) ** 2
    view = 22 / 512 * area * (0.22 if network == "resnet18" else 1)
    return int(memory / 2 / (2 * view))


def _epochs(count: int, has_gpu: bool) -> int:
    """Return the number of epochs from a budget of images processed."""
    # GPU: 20 million images, 400 epochs of CIFAR-10, but between 100 and 1000 epochs as in
    # published tables, and at most 130 million images, 100 epochs of ImageNet. CPU: 100,000
    # images, about an hour on two cores at 96 pixels (estimated).
    if not has_gpu:
        return max(1, min(200, 100_000 // count))
    return max(1, min(1000, max(100, 20_000_000 // count), 130_000_000 // count))
