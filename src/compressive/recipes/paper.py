"""The paper's ImageNet runs; "row N" is a difference of paper and code in docs/notation.md."""

from compressive.recipes.recipe import Recipe, SettingSources, Variant, make_recipe

PaperRun = tuple[str, str, int]  # method, network, epochs

PAPER_METHODS = ("simclr", "c-simclr", "byol", "c-byol")
NETWORKS = {  # timm name, width, description
    "r50": ("resnet50", 1, "ResNet-50"),
    "r50x2": ("resnet50", 2, "ResNet-50 of double width"),
    "r101": ("resnet101", 1, "ResNet-101"),
    "r152": ("resnet152", 1, "ResNet-152"),
}
TABLE_1: dict[PaperRun, tuple[float, ...]] = {  # top-1, its standard deviation, top-5, Brier (x100)
    ("simclr", "r50", 300): (69.1, 0.089, 89.1, 42.1),
    ("c-simclr", "r50", 300): (70.1, 0.177, 89.6, 41.0),
    ("byol", "r50", 300): (72.8, 0.155, 91.0, 37.3),
    ("c-byol", "r50", 300): (73.6, 0.039, 91.5, 36.5),
    ("simclr", "r50", 1000): (70.7, 0.094, 90.1, 40.0),
    ("c-simclr", "r50", 1000): (71.6, 0.084, 90.5, 39.7),
    ("byol", "r50", 1000): (74.2, 0.139, 91.7, 35.7),
    ("c-byol", "r50", 1000): (75.6, 0.151, 92.7, 34.0),
    ("simclr", "r50x2", 1000): (74.5, 0.014, 92.1, 35.2),
    ("c-simclr", "r50x2", 1000): (75.0, 0.082, 92.4, 34.7),
    ("byol", "r50x2", 1000): (77.2, 0.057, 93.5, 31.8),
    ("c-byol", "r50x2", 1000): (78.8, 0.088, 94.5, 29.8),
}
TABLE_10: dict[PaperRun, tuple[float, ...]] = {  # top-1, top-5
    ("byol", "r101", 1000): (76.4, 93.0),
    ("c-byol", "r101", 1000): (77.8, 93.9),
    ("byol", "r152", 1000): (77.3, 93.7),
    ("c-byol", "r152", 1000): (78.7, 94.4),
}
SECTION_3_2: dict[PaperRun, float] = {("c-byol", "r50", 1500): 76.0}
_CONTRADICTIONS: dict[PaperRun, str] = {
    ("simclr", "r50", 300): " (69.0 in Tables 5 and 15)",
    ("c-simclr", "r50", 300): " (70.2 in Tables 5, 11, 13 and 15)",
    ("simclr", "r50", 1000): " (70.6 in sec. A.5, 70.8 for the released checkpoint)",
    ("c-byol", "r50", 1000): " (75.8 for the released checkpoint)",
}
_SWEEPS: dict[PaperRun, dict[str, tuple[int, dict[float, float]]]] = {  # table, {value: top-1}
    ("simclr", "r50", 300): {"views.crop_scale_min": (15, {0.16: 68.6, 0.25: 67.6, 0.5: 61.4})},
    ("c-simclr", "r50", 300): {
        "bottleneck.beta": (5, {0: 69.7, 0.01: 69.7, 0.1: 70.1, 1.5: 69.7}),
        "bottleneck.kappa_e": (11, {256: 69.8, 512: 69.8, 2048: 69.8, 4096: 69.6, 8192: 69.6}),
        "bottleneck.kappa_b": (13, {1: 65.0, 3: 68.5, 15: 69.1, 20: 68.6}),
        "views.crop_scale_min": (15, {0.16: 70.0, 0.25: 68.9, 0.5: 64.3}),
    },
    ("byol", "r50", 300): {"decoder.kappa_d": (7, {2: 72.5})},
    ("byol", "r50", 1000): {"decoder.kappa_d": (8, {2: 74.2, 10: 74.2})},
    ("c-byol", "r50", 300): {
        "bottleneck.kappa_e": (12, {4096: 73.0, 8192: 73.3, 32768: 73.2}),
        "bottleneck.kappa_b": (13, {1: 73.1, 3: 73.3, 15: 73.4, 20: 73.2}),
        "bottleneck.beta": (14, {0.01: 73.0, 0.1: 73.1, 1.5: 73.4}),
    },
}
_ORIGINAL_SIMCLR = (  # secs. A.1, A.2 and A.4 list the differences
    *("views.policy=simclr", "network.hidden_dim=2048", "network.projection_dim=128"),
    *("network.head_last_norm=true", "optim.lr=0.3", "optim.weight_decay=1e-6"),
)
# Table 7 does not say with which learning rate BYOL had C-BYOL's head; BYOL's own is assumed.
_BYOL_WITH_LAYER = ("bottleneck.beta=0", "optim.lr=0.3")
_COMPARED: dict[PaperRun, list[Variant]] = {  # comparisons that change more than one setting
    ("simclr", "r50", 1000): [Variant(_ORIGINAL_SIMCLR, "Table 3: the original SimCLR", 69.3)],
    ("simclr", "r50x2", 1000): [Variant(_ORIGINAL_SIMCLR, "Table 3: the original SimCLR", 74.2)],
    ("c-simclr", "r50", 300): [Variant(("bottleneck.beta=2",), "collapsed, sec. 3.4")],
    ("c-byol", "r50", 300): [
        Variant((*_BYOL_WITH_LAYER, "bottleneck.stochastic=false"), "Table 7: linear, norm", 72.8),
        Variant(_BYOL_WITH_LAYER, "Table 7: linear, norm, sampling", 72.8),
    ],
}

ALWAYS: SettingSources = {
    "data.source": ("torchvision:ImageNet", "ours; DATA on the command line replaces it"),
    "data.split": ("train", "paper, sec. 3.1"),
    "data.max_side": (0, "ours; the official code crops from the full-size image"),
    "data.limit": (0, "paper, sec. 3.1"),
    "views.size": (224, "paper, sec. A.1"),
    "views.policy": ("byol", "paper, Table 6"),
    "views.crop_scale_min": (0.08, "paper, sec. A.1"),
    "views.blur": (True, "paper, Table 6; one sigma for each image, row 19"),
    "views.antialias": (False, "official code, row 22"),
    "network.stem": ("imagenet", "official code"),
    "network.variant": ("official", "official code, row 23, except the running variance, row 16"),
    "network.zero_init_last": (True, "official code, row 23"),
    "network.hidden_dim": (4096, "paper, sec. A.2"),
    "network.projection_dim": (256, "paper, sec. A.2"),
    "network.head_layers": (2, "paper, sec. A.2"),
    "network.head_last_norm": (False, "paper, sec. A.2"),
    "bottleneck.schedule": ("constant", "paper, row 26"),
    "bottleneck.adaptive_weight": ("likelihood", "ours: only for bottleneck.schedule=adaptive"),
    "bottleneck.target_residual": (None, "ours: off"),
    "bottleneck.stochastic": (True, "paper, secs. 2.2 and 2.3"),
    "bottleneck.backward_view": ("own", "paper, sec. 2.4, and official code: row 7"),
    "bottleneck.residual_estimator": ("sampled", "official code"),
    "decoder.same_view_negatives": (True, "official code, row 6"),
    "target.independent": (True, "official code, row 17"),
    "optim.name": ("lars", "paper, sec. A.4; in the form of the official code, row 15"),
    "optim.momentum": (0.9, "official code"),
    "optim.trust_coefficient": (0.001, "official code, row 15"),
    "train.batch_size": (4096, "paper, sec. 3.1"),
    "train.precision": ("auto", "ours; the official code has no mixed precision"),
}
LOSS: dict[str, SettingSources] = {
    "simclr": {"bottleneck.kappa_b": (10.0, "paper, sec. A.5: one over the temperature 0.1")},
    "c-simclr": {
        "bottleneck.kappa_e": (1024.0, "paper, sec. A.5"),
        "bottleneck.kappa_b": (10.0, "paper, sec. A.5"),
        "bottleneck.beta": (1.0, "paper, sec. A.5"),
    },
    "byol": {},
    "c-byol": {
        "bottleneck.kappa_e": (16384.0, "paper, sec. A.6"),
        "bottleneck.kappa_b": (10.0, "paper, sec. A.6"),
        "bottleneck.beta": (1.0, "paper, sec. A.6"),
    },
}


def imagenet(run: PaperRun) -> Recipe:
    """Return a run of Table 1, Table 10 (deeper ResNets) or sec. 3.2 (1500 epochs)."""
    method, network, epochs = run
    name, width, described = NETWORKS[network]
    place = "Table 1" if run in TABLE_1 else "Table 10" if run in TABLE_10 else "sec. 3.2"
    size: SettingSources = {
        "network.name": (name, "paper, app. D" if run in TABLE_10 else "paper, sec. A.2"),
        "network.width": (width, "paper, sec. A.2"),
        "train.epochs": (epochs, f"paper, {place}"),
    }
    return make_recipe(
        "{}/imagenet-{}-{}".format(*run),
        method,
        *(ALWAYS, LOSS[method], size, _schedule(run)),
        about=f"{place}: {described}, ImageNet, {epochs} epochs.",
        expected=f"{_result(run)}; linear evaluation, {place}{_CONTRADICTIONS.get(run, '')}",
        hardware=_hardware(run),
        needs="cluster",
        result=_result(run).partition(" (")[0].partition(", ")[0],
        variants=_variants(run),
    )


def _schedule(run: PaperRun) -> SettingSources:
    method, network, epochs = run
    short, byol = epochs == 300, "byol" in method
    lr = {True: (0.3, 0.35), False: (0.2, 0.26)}[short][method == "c-byol"]
    row = ", row 13" if method == "c-byol" and not short else ""
    caveat = " for 1000 epochs, not stated for 1500" if epochs == 1500 else ""
    layer: SettingSources = {
        "optim.lr": (lr, f"paper, sec. A.4{row}{caveat}"),
        "optim.weight_decay": (1e-6 if short else 1.5e-6, f"paper, sec. A.4{caveat}"),
        "optim.warmup_epochs": (20.0 if byol and network != "r50" else 10.0, "paper, sec. A.4"),
    }
    if byol:
        weight = 5 if short else 2
        kappa_d = (2.0 * weight, f"paper, sec. A.6: twice the weight {weight}{caveat}")
        rate = (0.99 if short else 0.996, f"paper, sec. A.4{caveat}")
        layer |= {"decoder.kappa_d": kappa_d, "target.ema_decay": rate}
    return layer


def _result(run: PaperRun) -> str:
    if run in TABLE_1:
        return "{} % top-1 (std {} of three trials), {} % top-5, Brier {}".format(*TABLE_1[run])
    if run in TABLE_10:
        return "{} % top-1, {} % top-5, mean of three trials".format(*TABLE_10[run])
    return f"{SECTION_3_2[run]} % top-1"


def _hardware(run: PaperRun) -> str:
    """Return the hardware and the training time, as far as they are published."""
    method, network, epochs = run
    cores = "64 Cloud TPU v3 cores (paper, sec. 3.1), hours not stated"
    if network != "r50":
        return cores
    if "byol" in method:
        return f"{cores}; BYOL's README reports 1000 epochs in about 8 h on 512 TPU v3"
    hours = epochs * 6 // 100
    return f"{cores}; about {hours} h on 32 TPU v3, from 6 h per 100 epochs in SimCLR's README"


def _variants(run: PaperRun) -> tuple[Variant, ...]:
    """Return other interpretations of the paper, then the rows of its ablations of this run."""
    method, _, epochs = run
    found = [
        Variant(("network.variant=timm",), "timm then computes the same features, row 23"),
        Variant(("views.antialias=true",), "anti-aliased crops, row 22"),
        Variant(("train.precision=float32",), "no bf16, like the official code"),
    ]
    if "byol" in method:
        found.append(Variant(("target.independent=false",), "the target starts as a copy, row 17"))
    else:
        found.append(Variant(("decoder.same_view_negatives=false",), "the pseudo-code's, row 6"))
    if method.startswith("c-"):
        linear = ("bottleneck.schedule=linear", "bottleneck.warmup_epochs=10")
        found.append(Variant(linear, "beta increases over 10 epochs, row 26"))
        found.append(
            Variant(("bottleneck.schedule=cosine",), "beta increases over the whole run, row 26")
        )
    if method == "c-byol" and epochs > 300:
        found.append(Variant(("optim.lr=0.25",), "the official script's, row 13"))
    for setting, (table, tops) in _SWEEPS.get(run, {}).items():
        rows = [(f"{setting}={value:g}", top1) for value, top1 in tops.items()]
        found += [Variant((change,), f"Table {table}", top1) for change, top1 in rows]
    return (*found, *_COMPARED.get(run, []))
