"""Plan and check a sweep: combinations of values and seeds, and the paper's ablations."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compressive import recipes
from compressive.config import Config, flat, method_info, unused_settings, with_data
from compressive.evaluation.tasks import SUITES, select_tasks, split_names

NO_SUITE = "none"  # train without evaluating
PRESETS = ("beta", "kappa-e", "kappa-b", "crop-area", "loss-weight")


class PlannedRun(NamedTuple):
    """One run of a sweep."""

    name: str  # of its folder
    label: str  # the varied settings; the same for all seeds
    varied: dict[str, str]  # dotted name -> value as given
    seed: int
    device: str

    @property
    def changes(self) -> list[str]:
        """Changes of this run to the settings that all runs share."""
        return [f"{name}={value}" for name, value in self.varied.items()] + [f"seed={self.seed}"]


def preset_axis(name: str, config: Config) -> tuple[str, list[str]]:
    """Return the setting that an ablation of the paper varies, and its values for this method.

    beta: Tables 5 and 14; kappa-e: Tables 11 and 12; kappa-b: Table 13; crop-area: Table 15;
    loss-weight: Tables 7 and 8, where kappa_d is twice the weight.
    """
    contrastive, predicting = "256 512 1024 2048 4096 8192", "4096 8192 16384 32768"
    kappa_e = predicting if method_info(config).decoder else contrastive
    known = {
        "beta": ("bottleneck.beta", "0 0.01 0.1 1 1.5"),
        "kappa-e": ("bottleneck.kappa_e", kappa_e),
        "kappa-b": ("bottleneck.kappa_b", "1 3 10 15 20"),
        "crop-area": ("views.crop_scale_min", "0.08 0.16 0.25 0.5"),
        "loss-weight": ("decoder.kappa_d", "2 4 10"),
    }
    if name not in known:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    setting, values = known[name]
    if reason := unused_settings(config).get(setting):
        raise ValueError(f"preset {name} varies {setting}, which has no effect: {reason}")
    return setting, values.split()


def plan_runs(
    data: str,
    *,
    recipe: str = "",
    vary: Sequence[str] = (),
    preset: str = "",
    seeds: str = "0",
    changes: Sequence[str] = (),
    base: Config | None = None,
) -> list[PlannedRun]:
    """Return every combination of the values with every seed; seeds of one setting are adjacent.

    `vary` are texts "section.name=value,value,...". `changes` are texts "section.name=value" for
    all runs. `base` are the settings to change if there is no recipe. Settings are validated before
    any run starts.
    """
    base = recipes.get(recipe).config if recipe else base or Config()
    base = with_data(base, data, *changes)
    axes = _varied_axes(vary, preset, changes, base)
    runs, configs = [], list[Config]()
    for values in itertools.product(*axes.values()):
        varied = dict(zip(axes, values, strict=True))
        short = {_short_name(name, axes): value for name, value in varied.items()}
        label = ", ".join(f"{name} {value}" for name, value in short.items())
        parts = [name + re.sub(r"[^\w.+-]+", "_", value) for name, value in short.items()]
        for seed in _parse_seeds(seeds):
            run = PlannedRun("-".join([*parts, f"seed{seed}"]), label, varied, seed, "")
            configs.append(with_data(base, data, *run.changes))
            runs.append(run._replace(device=configs[-1].train.device))
    _require_distinct(runs, configs, axes)
    return runs


def _varied_axes(
    vary: Sequence[str], preset: str, changes: Sequence[str], base: Config
) -> dict[str, list[str]]:
    """Return the settings that vary and their values."""
    axes = dict(_parse_axis(text) for text in vary)
    if len(axes) < len(vary):
        raise ValueError("a setting was varied twice; give all its values in one --vary")
    if preset:
        setting, values = preset_axis(preset, base)
        if setting in axes:
            raise ValueError(f"{setting} is varied by --preset {preset} and by --vary")
        axes[setting] = values
    for change in changes:
        if (name := change.partition("=")[0].strip()) in {*axes, "seed"}:
            raise ValueError(f"{name} must be given once, not by --set as well")
    return axes


def _require_distinct(
    runs: Sequence[PlannedRun], configs: Sequence[Config], axes: Iterable[str]
) -> None:
    """Raise ValueError if two runs have the same name, or differ only in unused settings."""
    read = []
    for config in configs:
        unused = unused_settings(config)
        read.append({name: value for name, value in flat(config).items() if name not in unused})
    for a, b in itertools.combinations(range(len(runs)), 2):
        if runs[a].name == runs[b].name or read[a] == read[b]:
            reasons = unused_settings(configs[a])
            why = [f"; {name}: {reasons[name]}" for name in axes if name in reasons]
            names = f"{runs[a].name} and {runs[b].name}"
            raise ValueError(f"two runs are the same: {names}{''.join(why)}")


def _parse_axis(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    split = [value.strip() for value in values.split(",")]
    if not all(split):
        raise ValueError(f"--vary must be NAME=VALUE,VALUE,..., got {text!r}")
    if name.strip() == "seed":
        raise ValueError(f"--vary cannot vary seed, got {text!r}; use --seeds")
    return name.strip(), split


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--seeds must be whole numbers separated by commas, got {text!r}"
        ) from None


def _short_name(name: str, axes: Iterable[str]) -> str:
    """Return the last part of a setting's name if no other varied setting shares it."""
    last = name.rpartition(".")[2]
    return last if sum(n.rpartition(".")[2] == last for n in axes) == 1 else name


def check_evaluation(suite: str, tasks: str, max_images: int, held_out: bool) -> None:
    """Raise the errors that `evaluate` would raise after the first run has been trained."""
    if suite == NO_SUITE:
        if tasks or max_images or held_out:
            raise ValueError(
                f"--suite {NO_SUITE} evaluates nothing; remove --tasks, --max-images, --held-out"
            )
        return
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, {NO_SUITE}, got {suite!r}")
    select_tasks(suite, split_names(tasks))
    if max_images < 0:
        raise ValueError(f"--max-images must be 0 or more, got {max_images}")
