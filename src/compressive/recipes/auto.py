"""Choose settings for a folder of images from its size and the available memory."""

import math

from compressive.recipes.recipe import Recipe, SettingSources, Variant, make_recipe
from compressive.recipes.small_batch import SMALL_BATCH, view_settings


def auto_recipe(count: int, side: int, *, memory: float = 0.0, epochs: int | None = None) -> Recipe:
    """A run to begin with for `count` images, whose shorter sides are `side` pixels at the median.

    memory: of the GPUs, all processes together, in GiB; 0 where there is none. epochs: where they
    are given. Labels change nothing here: probe and kNN see for themselves whether there are any.
    """
    if count < 2:
        raise ValueError(f"2 images or more are needed to tell them apart, got {count}")
    if side < 1 or not 0 <= memory < math.inf:
        raise ValueError(f"side must be 1 or more and memory 0 or more, got {side} and {memory}")
    has_gpu = memory > 0
    size = _view_size(side, has_gpu)
    views = view_settings(size, has_gpu)
    stem = views["network.stem"][0] == "cifar"
    network, epochs = _network(count, size, stem, memory), epochs or _epochs(count, has_gpu)
    have = f"{count:,} images of {side} pixels and " + (f"{memory:g} GiB" if has_gpu else "no GPU")
    layer: SettingSources = {
        "network.name": (network, f"ours, for {have}"),
        "train.batch_size": (_batch(count, network, size, stem, memory), f"ours, for {have}"),
        "train.epochs": (epochs, f"ours, for {have}"),
        "optim.warmup_epochs": (min(10.0, epochs / 10), "official code; at most a tenth of a run"),
        "probe.neighbors": (min(20, max(1, count // 10)), "default; at most a tenth of the images"),
    }
    loads = "which timm cannot load for its small stem" if stem else "which timm loads"
    return make_recipe(
        "folder",
        "c-simclr",
        *(SMALL_BATCH, views, layer),
        about=f"Ours, for {have}: a {network}, {loads}.",
        expected="unknown: nobody has tried with these images",
        hardware="GPU" if has_gpu else "CPU",
        variants=(
            Variant(
                ("bottleneck.beta=1", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=10"),
                "the paper's price, risen slowly",
            ),
        ),
    )


def _view_size(side: int, has_gpu: bool) -> int:
    """About what the images have: pixels that enlarging makes up cost as much as real ones."""
    upto = {32: 40, 64: 80, 96: 112, 128: 192}
    size = next((size for size, most in upto.items() if side <= most), 224)
    return size if has_gpu else min(size, 96)  # on a CPU 224 costs five times as much


def _network(count: int, size: int, small_stem: bool, memory: float) -> str:
    """ResNet-50 where images can fill it and 128 of them fit beside it, else ResNet-18."""
    can_fill = count >= 50_000 and size > 64
    fits = memory > 0 and _room("resnet50", size, small_stem, memory) >= 128
    return "resnet50" if can_fill and fits else "resnet18"


def _batch(count: int, network: str, size: int, small_stem: bool, memory: float) -> int:
    """A power of two, for two steps an epoch or more; images are each other's negatives.

    512 at most: more gains nothing on CIFAR-10 (dkobak), and up to there SGD needs no LARS.
    """
    most = min(512, _room(network, size, small_stem, memory)) if memory > 0 else 128
    return 2 ** int(math.log2(max(2, min(most, count // 2))))


def _room(network: str, size: int, small_stem: bool, memory: float) -> int:
    """How many images, two views each, fit into half of the memory; the rest is for the data.

    512 views of 224 pixels take ResNet-50 22 GB in bf16 (measured, H200). ResNet-18 has 0.22 times
    its activations, a small stem those of four times the side.
    """
    area = (size * (4 if small_stem else 1) / 224) ** 2
    view = 22 / 512 * area * (1 if network == "resnet50" else 0.22)
    return int(memory / 2 / (2 * view))


def _epochs(count: int, has_gpu: bool) -> int:
    """As many as make a run of sensible length, counted in looks at an image.

    GPU: 20 million, 400 epochs of CIFAR-10; but not below 100 epochs, with which published tables
    begin, nor above 1000, with which they end; in all 130 million, 100 epochs of ImageNet. CPU:
    100,000, about an hour on two cores at 96 pixels (estimated).
    """
    if not has_gpu:
        return max(1, min(200, 100_000 // count))
    return max(1, min(1000, max(100, 20_000_000 // count), 130_000_000 // count))
