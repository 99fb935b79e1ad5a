"""Recipes: the paper's values and results, origins of settings, automatic settings."""

import ast
import itertools
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import golden_json
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import noise

from compressive import networks, optim, recipes
from compressive.config import Config, flat, from_dict, override, total_steps
from compressive.data.sources import open_source
from compressive.recipes.auto import auto_recipe
from compressive.recipes.recipe import Recipe
from compressive.train.auto_config import median_side

FROZEN = Path(__file__).parent / "recipes.json"
SOURCE = Path(recipes.__file__).parent
TABLES = Path(__file__).parents[3] / "shared" / "paper" / "tables.json"
NAMES = recipes.names()
FOUR = ("simclr", "c-simclr", "byol", "c-byol")
IMAGENET = [name for name in NAMES if "imagenet-r" in name]


def freeze() -> str:
    return json.dumps({name: flat(recipes.get(name).config) for name in NAMES}, indent=1)


def table(name: str) -> dict[str, Any]:
    if not TABLES.exists():
        pytest.fail(f"{TABLES} is missing: put the shared folder beside the repository")
    tables = json.loads(TABLES.read_text())["tables"]
    return next(t for t in tables if t["id"] == name)


def values(row: dict[str, Any]) -> dict[str, float]:
    return {key: cell["value"] for key, cell in row["values"].items()}


def changes(recipe: Recipe) -> dict[tuple[str, ...], float | None]:
    return {variant.changes: variant.top1 for variant in recipe.variants}


def test_all_documented_recipes_exist() -> None:
    promised = {
        f"{method}/imagenet-{rest}"
        for method, rest in itertools.product(FOUR, ("r50-300", "r50-1000", "r50x2-1000"))
    }
    promised |= {f"{m}/imagenet-{n}-1000" for m in ("byol", "c-byol") for n in ("r101", "r152")}
    promised |= {"c-byol/imagenet-r50-1500", "simclr/quickstart", "c-simclr/quickstart"}
    promised |= {f"{method}/cifar10-r18-{epochs}" for method in FOUR for epochs in (200, 1000)}
    promised |= {"byol/cifar10-r18-500"}
    promised |= {"dcl/cifar10-r18-200", "vicreg/cifar10-r18-200"}
    promised |= {
        f"{method}/imagenet-{network}-300"
        for method in ("simclr", "c-simclr", "c-byol")
        for network in ("vits16", "convnextt")
    }
    assert set(NAMES) == promised
    assert len(NAMES) == len(promised)


def test_values_match_the_frozen_ones() -> None:
    """To change values, run `PYTHONPATH=tests uv run python tests/recipes/test_recipes.py`."""
    frozen = json.loads(FROZEN.read_text())
    assert list(frozen) == NAMES
    for name in NAMES:
        now = json.loads(json.dumps(flat(recipes.get(name).config)))
        assert now == frozen[name], name


@pytest.mark.parametrize("name", NAMES)
def test_recipe_round_trips_through_json(name: str) -> None:
    recipe = recipes.get(name)
    assert from_dict(json.loads(json.dumps(asdict(recipe.config)))) == recipe.config
    assert recipe.name == recipe.config.recipe == name
    assert recipe.config.method == name.split("/")[0]
    assert recipe.about
    assert recipe.expected
    assert recipe.hardware


# From Secs. 3.1 and A.2 to A.6 of the paper: lr, decay, warm-up, kappa_e, kappa_b, beta, w_byol,
# alpha_base; - if the method has none.
PAPER = """
simclr/imagenet-r50-300     0.3   1e-6    10  -      10  -    -  -
simclr/imagenet-r50-1000    0.2   1.5e-6  10  -      10  -    -  -
simclr/imagenet-r50x2-1000  0.2   1.5e-6  10  -      10  -    -  -
c-simclr/imagenet-r50-300   0.3   1e-6    10  1024   10  1.0  -  -
c-simclr/imagenet-r50-1000  0.2   1.5e-6  10  1024   10  1.0  -  -
c-simclr/imagenet-r50x2-1000 0.2  1.5e-6  10  1024   10  1.0  -  -
byol/imagenet-r50-300       0.3   1e-6    10  -      -   -    5  0.99
byol/imagenet-r50-1000      0.2   1.5e-6  10  -      -   -    2  0.996
byol/imagenet-r50x2-1000    0.2   1.5e-6  20  -      -   -    2  0.996
byol/imagenet-r101-1000     0.2   1.5e-6  20  -      -   -    2  0.996
byol/imagenet-r152-1000     0.2   1.5e-6  20  -      -   -    2  0.996
c-byol/imagenet-r50-300     0.35  1e-6    10  16384  10  1.0  5  0.99
c-byol/imagenet-r50-1000    0.26  1.5e-6  10  16384  10  1.0  2  0.996
c-byol/imagenet-r50-1500    0.26  1.5e-6  10  16384  10  1.0  2  0.996
c-byol/imagenet-r50x2-1000  0.26  1.5e-6  20  16384  10  1.0  2  0.996
c-byol/imagenet-r101-1000   0.26  1.5e-6  20  16384  10  1.0  2  0.996
c-byol/imagenet-r152-1000   0.26  1.5e-6  20  16384  10  1.0  2  0.996
"""


@pytest.mark.parametrize("line", PAPER.strip().splitlines(), ids=lambda line: line.split()[0])
def test_values_match_the_paper(line: str) -> None:
    name, *said = line.split()
    config = recipes.get(name).config
    bottleneck = config.bottleneck
    used = [
        *(config.optim.lr, config.optim.weight_decay, config.optim.warmup_epochs),
        *(bottleneck.kappa_e, bottleneck.kappa_b, bottleneck.beta),
        *(config.decoder.kappa_d / 2, config.target.ema_decay),
    ]
    for ours, theirs in zip(used, said, strict=True):
        assert theirs == "-" or ours == float(theirs)
    assert config.train.batch_size == 4096
    assert config.train.epochs == int(name.rsplit("-", 1)[1])
    assert (config.optim.name, config.optim.momentum, config.optim.trust_coefficient) == (
        "lars",
        0.9,
        0.001,
    )
    assert asdict(config.network) | {"name": "", "width": 0} == {
        **{"name": "", "width": 0, "stem": "imagenet", "variant": "official"},
        **{"zero_init_last": True, "hidden_dim": 4096, "projection_dim": 256},
        **{"weights": "", "drop_path": 0.0},
        **{"head_layers": 2, "head_last_norm": False},
    }
    assert (config.views.size, config.views.policy, config.views.crop_scale_min) == (
        224,
        "byol",
        0.08,
    )
    assert config.decoder.same_view_negatives
    assert config.target.independent


def test_all_paper_recipes_are_covered() -> None:
    assert {line.split()[0] for line in PAPER.strip().splitlines()} == set(IMAGENET)


# Values of the official code with the flags of its scripts; these two differ from the paper.
@pytest.mark.parametrize(
    ("name", "theirs", "change"),
    [
        ("c-simclr/imagenet-r50-1000", "csimclr_1000_bs4096", []),
        ("c-simclr/imagenet-r50-300", "csimclr_300_bs4096", []),
        ("c-byol/imagenet-r50-300", "cbyol_300_bs4096", []),
        ("c-byol/imagenet-r50-1000", "cbyol_1000_bs4096", ["optim.lr=0.25"]),
        ("c-byol/imagenet-r101-1000", "cbyol_1000_warm20", ["bottleneck.beta=1.5"]),
    ],
)
def test_schedules_match_the_official_code(name: str, theirs: str, change: list[str]) -> None:
    """Compare learning rate and EMA decay at stored steps.

    The reference is float32: 1e-5 relative, 1e-7.
    """
    golden = next(c for c in golden_json("schedules")["configs"] if c["name"] == theirs)
    config = override(recipes.get(name).config, *change)
    size = (golden["num_examples"], config.train.epochs, config.train.batch_size)
    total = total_steps(*size)
    warmup = optim.warmup_steps(size[0], config.optim.warmup_epochs, size[2])
    assert (total, warmup) == (golden["total_steps"], golden["warmup_steps"])
    peak = optim.scaled_lr(config.optim.lr, config.train.batch_size)
    for i, step in enumerate(golden["steps"]):
        lr = optim.warmup_cosine(step, peak=peak, warmup=warmup, total=total)
        assert lr == pytest.approx(golden["lr"][i], rel=1e-5, abs=1e-6)
        if name.startswith("c-byol"):
            rate = optim.ema_decay(step, base=config.target.ema_decay, total=total)
            assert rate == pytest.approx(golden["ema_alpha_schedule"][i], abs=1e-7)
    assert config.bottleneck.beta == golden["ceb_beta"]


@pytest.mark.slow
def test_networks_have_the_papers_sizes() -> None:
    dims = {"r50": 2048, "r50x2": 4096, "r101": 2048, "r152": 2048, "r18": 512}
    dims |= {"vits16": 384, "convnextt": 768}
    blocks = {"r50": 16, "r50x2": 16, "r101": 33, "r152": 50, "r18": 8}
    blocks |= {"vits16": 12, "convnextt": 18}
    seen = set()
    for name in NAMES:
        network = asdict(recipes.get(name).config.network)
        options = {k: v for k, v in network.items() if k not in OTHERS}
        if (key := str(options)) not in seen:
            seen.add(key)
            with torch.device("meta"):
                model: Any = networks.backbone(**options)
            if "quickstart" not in name:
                short = name.split("-")[-2]
                assert networks.feature_dim(model) == dims[short]
                kinds = ("BasicBlock", "Bottleneck", "Block", "ConvNeXtBlock")
                found = [part for part in model.modules() if type(part).__name__ in kinds]
                assert len(found) == blocks[short]
    assert len(seen) >= 5


OTHERS = ("weights", "drop_path", "hidden_dim", "projection_dim", "head_layers", "head_last_norm")


@pytest.mark.shared
def test_expected_accuracies_match_the_papers_tables() -> None:
    width = {"ResNet-50": "r50", "ResNet-50 2x": "r50x2"}
    checked = 0
    for row in table("linear_eval_r50")["rows"]:
        network, epochs = width[row["group"]["arch"]], row["group"]["epochs"]
        for family in ("simclr", "byol"):
            method = f"c-{family}" if row["row"] == "Compressed" else family
            expected = recipes.get(f"{method}/imagenet-{network}-{epochs}").expected
            cells = {metric: row["values"][f"{family}_{metric}"] for metric in METRICS}
            top1, top5, brier = (cells[metric] for metric in METRICS)
            numbers = (top1["value"], top1["std"], top5["value"], brier["value"])
            wanted = "{} % top-1 (std {} of three trials), {} % top-5, Brier {};".format(*numbers)
            assert expected.startswith(wanted)
            checked += 1
    for row in table("deeper_resnets")["rows"][1:]:
        for method in ("byol", "c-byol"):
            name = f"{method}/imagenet-r{row['row'].removeprefix('ResNet-')}-1000"
            key = method.replace("-", "")
            top1, top5 = (row["values"][f"{key}_{k}"]["value"] for k in ("top1", "top5"))
            assert recipes.get(name).expected.startswith(f"{top1} % top-1, {top5} % top-5")
            checked += 1
    inline = {r["id"]: r for r in json.loads(TABLES.read_text())["inline_results"]}
    longest = inline["cbyol_r50_1500ep"]["value"]
    assert recipes.get("c-byol/imagenet-r50-1500").expected.startswith(f"{longest} % top-1;")
    assert checked + 1 == len(IMAGENET)


METRICS = ("top1", "top5", "brier")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "setting", "source", "row", "ours", "scale"),
    [
        ("c-simclr", "bottleneck.kappa_e", "kappa_e_csimclr", 0, "1024", 1),
        ("c-byol", "bottleneck.kappa_e", "kappa_e_cbyol", 0, "16384", 1),
        ("c-simclr", "bottleneck.kappa_b", "kappa_b", 0, "10", 1),
        ("c-byol", "bottleneck.kappa_b", "kappa_b", 1, "10", 1),
        ("c-byol", "bottleneck.beta", "cbyol_beta", 0, "1.0", 1),
        ("simclr", "views.crop_scale_min", "area_lower_bound", 0, "8", 100),
        ("c-simclr", "views.crop_scale_min", "area_lower_bound", 1, "8", 100),
    ],
)
def test_sweep_variants_match_the_papers_tables(
    name: str, setting: str, source: str, row: int, ours: str, scale: int
) -> None:
    """Each column except the recipe's own is a variant with the paper's number."""
    recipe = recipes.get(f"{name}/imagenet-r50-300")
    columns = values(table(source)["rows"][row])
    assert flat(recipe.config)[setting] == float(ours) / scale
    columns.pop(ours)
    columns.pop("BYOL", None)
    wanted = {(f"{setting}={float(c) / scale:g}",): top1 for c, top1 in columns.items()}
    assert wanted.items() <= changes(recipe).items()


@pytest.mark.shared
def test_other_ablations_match_the_papers_tables() -> None:
    csimclr = changes(recipes.get("c-simclr/imagenet-r50-300"))
    for row in table("beta_csimclr")["rows"]:
        beta = row["group"]["beta"]
        if beta not in (None, 1):
            assert csimclr[(f"bottleneck.beta={beta:g}",)] == values(row)["imagenet"]
    byol, cbyol = (changes(recipes.get(f"{m}/imagenet-r50-300")) for m in ("byol", "c-byol"))
    first, own, linear, sampled, compressed = (
        values(row)["top1"] for row in table("byol_300e_ablation")["rows"]
    )
    assert byol[("decoder.kappa_d=2",)] == first
    assert recipes.get("byol/imagenet-r50-300").expected.startswith(f"{own} %")
    free = ("bottleneck.beta=0", "optim.lr=0.3")
    assert cbyol[(*free, "bottleneck.stochastic=false")] == linear
    assert cbyol[free] == sampled
    assert recipes.get("c-byol/imagenet-r50-300").expected.startswith(f"{compressed} %")
    long = changes(recipes.get("byol/imagenet-r50-1000"))
    weights = {r["group"]["w_byol"]: values(r)["top1"] for r in table("byol_1000e_loss_w")["rows"]}
    assert weights.pop(2.0)
    assert {(f"decoder.kappa_d={2 * w:g}",): t for w, t in weights.items()}.items() <= long.items()
    original = values(table("sota")["rows"][0])
    for network, key in (("r50", "r50_1x_top1"), ("r50x2", "r50_2x_top1")):
        assert original[key] in changes(recipes.get(f"simclr/imagenet-{network}-1000")).values()


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_an_origin(name: str) -> None:
    """A setting of origin "default" has the default value."""
    recipe = recipes.get(name)
    used, defaults = flat(recipe.config), flat(Config())
    assert set(recipe.origins) == set(used)
    assert all(recipe.origins.values())
    for setting, source in recipe.origins.items():
        if source == "default":
            assert used[setting] == defaults[setting], setting
    if "imagenet" in name:
        learned = ("views", "network", "bottleneck", "decoder", "target", "optim")
        assert "default" not in [recipe.origins[s] for s in used if s.startswith(learned)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_changes_only_its_named_settings(name: str) -> None:
    recipe = recipes.get(name)
    before = flat(recipe.config)
    for variant in recipe.variants:
        after = flat(override(recipe.config, *variant.changes))
        changed = {setting for setting in before if before[setting] != after[setting]}
        named = [change.partition("=")[0] for change in variant.changes]
        assert changed == set(named), variant
        assert not all(recipe.origins[s].startswith("not read") for s in named), variant
    assert len(changes(recipe)) == len(recipe.variants)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("c-byol/imagenet-r50-1000", "optim.lr=0.25"),
        ("c-byol/imagenet-r50-1500", "optim.lr=0.25"),
        ("c-byol/imagenet-r50-300", "target.independent=false"),
        ("byol/imagenet-r50-300", "target.independent=false"),
        ("simclr/imagenet-r50-300", "decoder.same_view_negatives=false"),
        ("c-simclr/imagenet-r50-300", "decoder.same_view_negatives=false"),
        ("c-simclr/imagenet-r50-300", "network.variant=timm"),
        ("c-simclr/imagenet-r50-300", "views.antialias=true"),
    ],
)
def test_differences_between_paper_and_code_are_variants(name: str, change: str) -> None:
    assert (change,) in changes(recipes.get(name))


def test_unknown_name_error_suggests_the_nearest() -> None:
    near = re.escape("c-simclr/imagenet-r50-300")
    with pytest.raises(ValueError, match=f"'c-simclr/imagenet-r50-30'.*{near}") as caught:
        recipes.get("c-simclr/imagenet-r50-30")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'zzz'"):
        recipes.get("zzz")


def test_long_cifar_decay_is_between_two_published_values() -> None:
    """lr times decay at batch 512 in dkobak/simclr-cifar10 is 0.06 and 0.12 times 5e-4."""
    config = recipes.get("simclr/cifar10-r18-1000").config
    product = optim.scaled_lr(config.optim.lr, config.train.batch_size) * config.optim.weight_decay
    assert 0.06 * 5e-4 <= product <= 0.12 * 5e-4


def test_only_compressed_methods_have_beta_variants() -> None:
    for name in NAMES:
        offered = any(".beta=" in change for pair in changes(recipes.get(name)) for change in pair)
        if not name.startswith("c-"):
            assert not offered, name
        elif "cifar10" in name:
            assert offered, name


def test_compressed_recipes_differ_only_in_the_bottleneck() -> None:
    """Both must be comparable. C-BYOL's learning rate is the exception: the paper raises it."""
    for name in NAMES:
        method, _, rest = name.partition("/")
        if method.startswith("c-") and (plain := f"{method[2:]}/{rest}") in NAMES:
            ours, theirs = flat(recipes.get(name).config), flat(recipes.get(plain).config)
            different = {setting for setting in ours if ours[setting] != theirs[setting]}
            allowed = {"recipe", "method"} | {s for s in ours if s.startswith("bottleneck.")}
            allowed |= {"optim.lr"} if name.startswith("c-byol/imagenet") else set()
            assert different <= allowed, name


COUNTS = st.floats(0.31, 8.0).map(lambda power: int(10**power))  # 2 to 10^8, log-uniform


@pytest.mark.slow
@settings(max_examples=50)
@example(2, 1, 0.0)
@example(10**8, 300, 24.0)
@given(COUNTS, st.integers(1, 10_000), st.one_of(st.just(0.0), st.floats(0.1, 2000.0)))
def test_automatic_settings_are_valid_for_any_folder(count: int, side: int, memory: float) -> None:
    recipe = recipes.auto_recipe(count, side, memory=memory)
    config = recipe.config
    assert from_dict(json.loads(json.dumps(asdict(config)))) == config
    assert set(recipe.origins) == set(flat(config))
    assert config.method == "c-simclr"
    batch, epochs = config.train.batch_size, config.train.epochs
    assert 2 <= batch <= min(count, 512)
    assert batch & (batch - 1) == 0
    assert 0 < config.optim.warmup_epochs < epochs
    assert optim.warmup_steps(count, config.optim.warmup_epochs, batch) < total_steps(
        count, epochs, batch
    )
    looks = count * epochs
    assert looks <= max(count, 130_000_000 if memory else 100_000)
    assert epochs <= 1000
    assert config.probe.neighbors <= max(1, count // 10)
    # Images are enlarged by at most half, except tiny ones.
    assert config.views.size <= max(32, 1.5 * side)
    assert config.network.variant == "timm"
    assert ("timm cannot load" in recipe.about) == (config.network.stem == "cifar")
    if not memory:
        assert config.views.size <= 96
        assert config.network.name == "resnet18"


@pytest.mark.slow
@settings(max_examples=50)
@given(COUNTS, st.integers(1, 1000), st.floats(0.1, 500.0), st.floats(1.0, 8.0))
def test_more_memory_never_gives_a_smaller_batch_or_network(
    count: int, side: int, memory: float, factor: float
) -> None:
    less = recipes.auto_recipe(count, side, memory=memory).config
    more = recipes.auto_recipe(count, side, memory=memory * factor).config
    if less.network.name == more.network.name:
        assert less.train.batch_size <= more.train.batch_size
    else:
        assert (less.network.name, more.network.name) == ("resnet18", "resnet50")
        assert more.train.batch_size >= 128


def test_automatic_settings_of_known_datasets() -> None:
    """CIFAR-10 and ImageNet on an H200, and 1,530 photographs on a CPU."""
    runs = [(50_000, 32, 140.0), (1_281_167, 375, 140.0), (1_530, 200, 0.0)]
    found = []
    for count, side, memory in runs:
        config = recipes.auto_recipe(count, side, memory=memory).config
        network = (config.network.name, config.network.stem == "cifar", config.views.size)
        found.append((*network, config.train.batch_size, config.train.epochs))
    assert found == [
        ("resnet18", True, 32, 512, 400),
        ("resnet50", False, 224, 512, 100),
        ("resnet18", False, 96, 128, 65),
    ]


def test_batch_size_matches_measured_memory_of_resnet50() -> None:
    """Measured: 22 GB for 512 views.

    With 44 GiB, half of it for the network, that is 256 images.
    """
    config = recipes.auto_recipe(10**6, 300, memory=44.0).config
    assert (config.network.name, config.train.batch_size) == ("resnet50", 256)


@pytest.mark.parametrize(
    ("count", "side", "memory", "parts"),
    [(1, 32, 0.0, "count.* 1$"), (9, 0, 0.0, "side.* 0 "), (9, 9, -1.0, r"memory.* -1\.0$")],
)
def test_invalid_folder_statistics_are_rejected(
    count: int, side: int, memory: float, parts: str
) -> None:
    with pytest.raises(ValueError, match=parts):
        recipes.auto_recipe(count, side, memory=memory)


@pytest.mark.parametrize(
    "path", [*SOURCE.glob("*.py"), SOURCE.parent / "config.py"], ids=lambda path: path.stem
)
def test_recipes_import_only_the_standard_library(path: Path) -> None:
    """This keeps `compressive recipes` fast."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
    assert roots <= set(sys.stdlib_module_names) | {"compressive"}


@pytest.mark.parametrize(("epochs", "warmup"), [(5, 0.5), (50, 5.0), (100, 10.0), (400, 10.0)])
def test_automatic_warmup_is_a_tenth_of_the_run_up_to_ten_epochs(
    epochs: int, warmup: float
) -> None:
    found = auto_recipe(1000, 64, given={"train.epochs": epochs}).config
    assert found.optim.warmup_epochs == warmup


def test_median_side_uses_the_shorter_sides(tmp_path: Path) -> None:
    """Shorter sides are 40, 50 and 60; longer sides are 90, in landscape and portrait."""
    for i, (height, width) in enumerate(((40, 90), (90, 50), (60, 90))):
        noise(height, width).save(tmp_path / f"{i}.png")
    assert median_side(open_source(str(tmp_path))) == 50


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("byol", "target.ema_decay", 0.99),
        ("c-simclr", "bottleneck.schedule", "adaptive"),
        ("c-simclr", "bottleneck.kappa_b", 7.0),
        ("simclr", "bottleneck.kappa_b", 5.0),
        ("c-simclr", "bottleneck.beta", 1.0),
        ("c-simclr", "bottleneck.warmup_epochs", 10.0),
        ("c-byol", "bottleneck.kappa_e", 16384.0),
        ("c-byol", "bottleneck.beta", 0.01),
        ("c-byol", "bottleneck.schedule", "constant"),
        ("dcl", "bottleneck.kappa_b", 10.0),
        ("vicreg", "network.projection_dim", 2048),
        ("simclr", "optim.lr", 0.2),
    ],
)
def test_automatic_settings_follow_the_method(
    method: str, setting: str, value: float | str
) -> None:
    config = auto_recipe(1000, 64, given={"method": method}).config
    assert config.method == method
    assert flat(config)[setting] == value


@pytest.mark.parametrize(("batch", "beta"), [(32, 1.0), (255, 1.0), (256, 3.0), (512, 3.0)])
def test_small_batches_are_compressed_less(batch: int, beta: float) -> None:
    config = auto_recipe(1000, 64, given={"train.batch_size": batch}).config
    assert config.bottleneck.beta == beta


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bottleneck.schedule", "constant"),
        ("bottleneck.schedule", "linear"),
        ("bottleneck.schedule", "cosine"),
        ("bottleneck.target_residual", 0.5),
    ],
)
def test_other_schedules_start_from_a_small_beta(name: str, value: float | str) -> None:
    """A constant beta of 3 can collapse."""
    config = auto_recipe(50_000, 32, memory=80.0, given={name: value}).config
    assert config.train.batch_size == 512
    assert (config.bottleneck.beta, config.bottleneck.kappa_b) == (0.1, 5.0)
    assert config.bottleneck.schedule == "constant"


if __name__ == "__main__":
    FROZEN.write_text(freeze() + "\n")
