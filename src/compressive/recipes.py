"""Runs that someone has thought through: the paper's, CIFAR-10's, the quick start's, a folder's.

Longer than 300 lines, most of them values with the reason for each.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from compressive import paper
from compressive.config import Config, flat, from_dict, idle
from compressive.paper import Layer, Variant


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A config, and what is known about it."""

    name: str
    config: Config
    about: str
    expected: str
    hardware: str
    origins: dict[str, str]  # every dotted setting -> where its value comes from
    variants: tuple[Variant, ...] = ()  # what to `--set` for another reading or an ablation


# For a batch that one device holds. "The pilot" is 60 epochs of CIFAR-10 with ResNet-18 at batch
# 512 on an H200, one seed, thrown away but for its numbers. dkobak is dkobak/simclr-cifar10.
_SMALL: Layer = {
    "views.set": ("paper", "paper, Table 6"),
    "views.crop_area_min": (0.08, "paper, sec. A.1; solo-learn's for CIFAR-10"),
    "network.name": ("resnet18", "ours"),
    "network.hidden": (2048, "solo-learn's SimCLR for CIFAR-10"),
    "network.out": (256, "paper, sec. A.2: kappa_e has its meaning on that sphere"),
    "bottleneck.kappa_e": (1024.0, "paper, sec. A.5"),
    "bottleneck.kappa_b": (5.0, "temperature 0.2: solo-learn for CIFAR-10, simclr#166"),
    "bottleneck.beta": (0.1, "ours, not the paper's: in the pilot the best of 0, 0.1 and 1"),
    "optim.name": ("sgd", "ours, the pilot's"),
    "optim.lr": (0.2, "ours, the pilot's: 0.4 at batch 512"),
    "optim.momentum": (0.9, "ours, everybody's"),
    # Weights before a batch norm feel only lr times decay in the long run: 4e-5 at batch 512, where
    # dkobak has 3e-5 for 1000 epochs and 6e-5 for 100.
    # 5e-4 gains after 100 epochs (kNN +0.5 to +0.7, held-out) and nothing after 200.
    "optim.weight_decay": (1e-4, "ours; with this lr about dkobak's lr times decay"),
}
# Numbers of lightly's for CIFAR-10 at batch 512, but for the learning rate (our loss is 20 times
# theirs; before batch norms that matters to the first steps alone). 13 runs of 20 or 30 epochs,
# with smaller rates of SGD, had said AdamW and a quicker target: kNN 74.8 after 50 epochs.
_SMALL_BOOTSTRAP: Layer = {
    "decoder.kappa_d": (10.0, "paper, sec. A.6, 300 epochs: twice the weight 5"),
    "target.rate": (0.99, "lightly's; paper, 300 epochs"),
    "target.independent": (False, "ours, and lightly's: a copy gains a little"),
    "optim.name": ("sgd", "lightly's"),
    "optim.lr": (0.24, "ours, by held-out labels, of 0.12 (lightly's) and 0.24"),
    "optim.weight_decay": (5e-4, "lightly's"),
}
# At the paper's beta of 1 from the start z became a constant within 300 steps: 0.02 movable nats,
# the loss of a decoder that knows the mean direction alone. The log has more.
_RISING: Layer = {
    "bottleneck.schedule": ("linear", "ours: at a price of 1 from the start z is a constant"),
    "bottleneck.warmup_epochs": (10.0, "ours: as long as the learning rate's"),
}
_PRICE: dict[str, Layer] = {
    "c-simclr": {"bottleneck.beta": (0.3, "ours, by held-out labels, of 0, 0.1, 0.3 and 1")},
    "c-byol": {"bottleneck.beta": (0.01, "ours, by held-out labels, of 0, 0.01, 0.1 and 1")},
}
# docs/results/2026-11-15-cifar10.md: test images, means of three seeds.
_CIFAR_HERE = {
    "simclr": "after 200 epochs linear 90.3, kNN 89.8",
    "c-simclr": "after 200 epochs linear 90.4, kNN 90.0, after 300 (optim.lr=0.2, one seed) "
    "linear 90.8, kNN 90.7",
    "byol": "after 200 epochs linear 90.6, kNN 90.1",
    "c-byol": "after 200 epochs linear 90.6, kNN 90.1",
}
_CIFAR_ELSEWHERE = {
    ("simclr", 200): "kNN 84.8 (lightly, batch 512)",
    ("simclr", 1000): "linear 90.74 (solo-learn), 91.7 (dkobak, three seeds)",
    ("byol", 200): "kNN 86.8 (lightly, batch 512)",
    ("byol", 1000): "linear 92.58 (solo-learn)",
}
_CIFAR_VARIANTS = {
    "simclr": (
        Variant(
            ("bottleneck.kappa_b=2",), "temperature 0.5: SimCLR's command for CIFAR-10, dkobak"
        ),
        Variant(("bottleneck.kappa_b=10",), "the paper's temperature"),
        Variant(
            ("bottleneck.kappa_b=10", "bottleneck.beta=1"),
            "the paper's temperature and beta: linear 89.5, SimCLR's there 87.8 (200 epochs, "
            "decay 5e-4)",
        ),
        Variant(("bottleneck.beta=1",), "the paper's beta"),
        Variant(("views.set=simclr", "views.strength=0.5"), "SimCLR's command for CIFAR-10"),
        Variant(("views.crop_area_min=0.08",), "paper, sec. A.1; solo-learn's for CIFAR-10"),
        Variant(("optim.name=lars", "optim.lr=1"), "SimCLR's command for CIFAR-10"),
    ),
    "byol": (
        Variant(("bottleneck.beta=1", "bottleneck.schedule=constant"), "the paper's beta"),
        Variant(
            ("bottleneck.beta=0.1", "bottleneck.b_sees=other"),
            "b(z|y) looks at the other view: on held-out images logistic regression 86.3, kNN 84.0",
        ),
        Variant(("target.independent=true",), "the target starts with weights of its own: paper"),
        Variant(
            (
                *("optim.name=adamw", "optim.lr=0.001", "optim.weight_decay=0.01"),
                *("target.rate=0.97", "train.batch=256"),
            ),
            "what 20 epochs had favored",
        ),
    ),
}


def imagenet(method: str, network: str, epochs: int) -> Recipe:
    """The paper's runs: Table 1, Table 10 (deeper ResNets) and sec. 3.2 (1500 epochs).

    Linear evaluation gives 69.1 to 78.8 % top-1, each recipe says its own. 64 Cloud TPU v3 cores,
    for hours that the paper does not state.
    """
    run = (method, network, epochs)
    return _recipe(
        f"{method}/imagenet-{network}-{epochs}",
        method,
        paper.settings(run),
        about=f"{paper.place(run)}: {paper.NETWORKS[network][2]}, ImageNet, {epochs} epochs.",
        expected=paper.result(run),
        hardware=paper.hardware(run),
        variants=paper.variants(run),
    )


def cifar10(method: str, epochs: int) -> Recipe:
    """CIFAR-10 with ResNet-18 on one GPU: ours, the paper has no such run and no number.

    `expected` has what this and other code reached. 200 epochs of SimCLR or C-SimCLR are 5 minutes
    on an H200.
    """
    plain = method.removeprefix("c-")
    layer: Layer = {
        "data.source": ("torchvision:CIFAR10", "ours; a path on the command line takes its place"),
        "views.crop_area_min": (0.2, "SimSiam's and dkobak's for CIFAR-10; ahead from the start"),
        "network.first_shortcut": (True, "official code, row 23"),
        "network.paper_init": (True, "official code, row 23"),
        "train.batch": (512, "SimCLR's command for CIFAR-10; more gains nothing (dkobak)"),
        "train.epochs": (epochs, "its name"),
        "optim.warmup_epochs": (10.0, "official code"),
    }
    own = paper.LOSS[method] | _SMALL_BOOTSTRAP if plain == "byol" else {}
    if plain == "simclr" and epochs == 200:  # 1.5 points ahead after 60 epochs, hardly after 200
        own = {"optim.lr": (0.4, "ours, by held-out labels: level with 0.2, ahead in shorter runs")}
    price = {} if method == plain else _RISING | _PRICE[method]
    variants = _CIFAR_VARIANTS[plain]
    if method == plain:  # what is not compressed has no price
        variants = tuple(v for v in variants if not any(".beta=" in c for c in v.changes))
    return _recipe(
        f"{method}/cifar10-r18-{epochs}",
        method,
        *(_SMALL, _views(32, has_gpu=True), layer, own, price),
        about=f"Ours: ResNet-18 with a small stem, CIFAR-10, {epochs} epochs.",
        expected=f"not in the paper; {'here' if epochs == 200 else 'not run here, but'} "
        f"{_CIFAR_HERE[method]}; {plain} elsewhere: "
        f"{_CIFAR_ELSEWHERE[plain, epochs]}",
        hardware="one GPU",
        variants=variants,
    )


def quickstart(method: str) -> Recipe:
    """The built-in pictures on two CPU cores: ours, to see everything work within minutes."""
    why = "ours, for minutes on two CPU cores"
    layer: Layer = {
        "data.source": ("builtin", why),
        "views.size": (32, "the pictures'"),
        "views.crop_area_min": (0.5, "ours, by held-out labels: with 0.08 it takes twice as long"),
        "views.blur": (False, "as for CIFAR-10"),
        "network.name": ("test_resnet", "ours: 0.4 million weights, timm's smallest ResNet"),
        "network.hidden": (512, why),
        "bottleneck.kappa_b": (10.0, "paper, sec. A.5"),
        "bottleneck.schedule": ("linear", "ours: gains C-SimCLR 4 points in so short a run"),
        "bottleneck.warmup_epochs": (1.0, "ours: as long as the learning rate's"),
        "optim.name": ("adamw", "ours: quicker than SGD in so few steps"),
        "optim.lr": (0.032, "ours: the best of a few"),
        "optim.weight_decay": (0.01, "torch's"),
        "optim.warmup_epochs": (1.0, why),
        "train.batch": (128, why),
        "train.epochs": (3, why),
        "probe.every_epochs": (1.0, why),
    }
    return _recipe(
        f"{method}/quickstart",
        method,
        *(_SMALL, layer),
        about="Ours: the built-in pictures, to see everything work.",
        expected="not in the paper; linear: SimCLR 82.0, C-SimCLR 78.3, pixels 9.5",
        hardware="two CPU cores",
    )


def for_folder(count: int, side: int, *, memory: float = 0.0, epochs: int | None = None) -> Recipe:
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
    views = _views(size, has_gpu)
    stem = views["network.small_stem"][0]
    network, epochs = _network(count, size, stem, memory), epochs or _epochs(count, has_gpu)
    have = f"{count:,} images of {side} pixels and " + (f"{memory:g} GiB" if has_gpu else "no GPU")
    layer: Layer = {
        "network.name": (network, f"ours, for {have}"),
        "train.batch": (_batch(count, network, size, stem, memory), f"ours, for {have}"),
        "train.epochs": (epochs, f"ours, for {have}"),
        "optim.warmup_epochs": (min(10.0, epochs / 10), "official code; at most a tenth of a run"),
        "probe.neighbors": (min(20, max(1, count // 10)), "default; at most a tenth of the images"),
    }
    loads = "which timm cannot load for its small stem" if stem else "which timm loads"
    return _recipe(
        "folder",
        "c-simclr",
        *(_SMALL, views, layer),
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


def _views(size: int, has_gpu: bool) -> Layer:
    """The views' size and what goes with it: of 32 pixels ResNet's own stem would leave 8."""
    # At 64 the small stem costs 16 times as much as ResNet's own: too much for a CPU.
    small = size <= (64 if has_gpu else 32)
    stem = "SimCLR's for CIFAR-10" if small else "ours: timm can load the encoder"
    blur = "SimCLR's command for CIFAR-10 has none" if size <= 32 else "paper, Table 6"
    return {
        "views.size": (size, "about the images' own size"),
        "views.blur": (size > 32, blur),
        "network.small_stem": (small, stem),
    }


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


def names() -> list[str]:
    """Every recipe, the paper's first."""
    return list(_book())


def get(name: str) -> Recipe:
    """The recipe of that name."""
    book = _book()
    if name not in book:
        near = difflib.get_close_matches(name, book, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`compressive recipes` lists them"
        raise ValueError(f"no recipe {name!r}; {hint}")
    return book[name]()


def _book() -> dict[str, Callable[[], Recipe]]:
    """Name -> what makes the recipe."""
    book: dict[str, Callable[[], Recipe]] = {}
    for run in (*paper.TABLE_1, *paper.TABLE_10, *paper.SECTION_3_2):
        book["{}/imagenet-{}-{}".format(*run)] = partial(imagenet, *run)
    for epochs in (200, 1000):
        for method in paper.METHODS:
            book[f"{method}/cifar10-r18-{epochs}"] = partial(cifar10, method, epochs)
    return book | {f"{m}/quickstart": partial(quickstart, m) for m in ("simclr", "c-simclr")}


def _recipe(name: str, method: str, *layers: Layer, **words: Any) -> Recipe:
    """Layers on the defaults, a later one over an earlier; `words` are the other fields."""
    values: Layer = {"recipe": (name, "its name"), "method": (method, "its name")}
    for layer in layers:
        values |= layer
    settings: dict[str, Any] = {}
    for setting, (value, _) in values.items():
        section, _, leaf = setting.rpartition(".")
        (settings.setdefault(section, {}) if section else settings)[leaf] = value
    config = from_dict(settings)
    origins = dict.fromkeys(flat(config), "default")
    origins |= {setting: source for setting, (_, source) in values.items()}
    origins |= {setting: f"not read: {why}" for setting, why in idle(config).items()}
    return Recipe(name=name, config=config, origins=origins, **words)
