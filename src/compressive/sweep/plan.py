"""Which runs a sweep consists of: combinations of values and seeds, and the paper's ablations."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from compressive import recipes
from compressive.config import Config, flat, method_info, unused_settings, with_data

PRESETS = ("beta", "kappa-e", "kappa-b", "crop-area", "loss-weight")


class Job(NamedTuple):
    """One run of a sweep."""

    name: str  # of its folder
    setting: str  # what it shares with the runs of other seeds, in words
    varied: dict[str, str]  # dotted name -> value as given
    seed: int
    device: str

    @property
    def changes(self) -> list[str]:
        """What makes it of the settings that all have in common."""
        return [f"{name}={value}" for name, value in self.varied.items()] + [f"seed={self.seed}"]


def ablation(name: str, config: Config) -> tuple[str, list[str]]:
    """What an ablation of the paper varies, and its values for this method.

    beta: Tables 5 and 14; kappa-e: Tables 11 and 12; kappa-b: Table 13; crop-area: Table 15;
    loss-weight: Tables 7 and 8, kappa_d being twice the weight.
    """
    wide = "256 512 1024 2048 4096 8192"
    kappa_e = wide if not method_info(config).decoder else "4096 8192 16384 32768"
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
    if why := unused_settings(config).get(setting):
        raise ValueError(f"preset {name} varies {setting}, which changes nothing: {why}")
    return setting, values.split()


def plan(
    data: str,
    *,
    recipe: str = "",
    vary: Sequence[str] = (),
    preset: str = "",
    seeds: str = "0",
    changes: Sequence[str] = (),
    base: Config | None = None,
) -> list[Job]:
    """Every combination of the values with every seed, the seeds of one setting together.

    vary: "section.name=value,value,..."; changes: "section.name=value", the same for all. What can
    be told of the settings alone is checked here, before the first run has cost anything. base:
    what runs begin with where there is no recipe.
    """
    base = recipes.get(recipe).config if recipe else base or Config()
    base = with_data(base, data, *changes)
    axes = dict(_axis(text) for text in vary)
    if len(axes) < len(vary):
        raise ValueError("a setting was varied twice; give all its values in one --vary")
    if preset:
        setting, values = ablation(preset, base)
        if setting in axes:
            raise ValueError(f"{setting} is varied by --preset {preset} and by --vary")
        axes[setting] = values
    for change in changes:
        if (name := change.partition("=")[0].strip()) in {*axes, "seed"}:
            raise ValueError(f"{name} must be given once, not by --set as well")
    jobs, found = [], list[Config]()
    for values in itertools.product(*axes.values()):
        varied = dict(zip(axes, values, strict=True))
        setting = ", ".join(f"{_short(name, axes)} {v}" for name, v in varied.items())
        for seed in _seeds(seeds):
            words = [f"{_short(name, axes)}{_safe(v)}" for name, v in varied.items()]
            device = base.train.device
            job = Job("-".join([*words, f"seed{seed}"]), setting, varied, seed, device)
            found.append(with_data(base, data, *job.changes))
            jobs.append(job._replace(device=found[-1].train.device))
    _require_apart(jobs, found, axes)
    return jobs


def _require_apart(jobs: Sequence[Job], configs: Sequence[Config], axes: Iterable[str]) -> None:
    """Refuse two runs of one name, or that differ in nothing that a run looks at."""
    read = [_read(config) for config in configs]
    for a, b in itertools.combinations(range(len(jobs)), 2):
        if jobs[a].name == jobs[b].name or read[a] == read[b]:
            vain = [
                f"; {name}: {why}"
                for name, why in unused_settings(configs[a]).items()
                if name in axes
            ]
            names = f"{jobs[a].name} and {jobs[b].name}"
            raise ValueError(f"two runs are the same: {names}{''.join(vain)}")


def _read(config: Config) -> dict[str, Any]:
    """The settings that a run looks at."""
    return {
        name: value for name, value in flat(config).items() if name not in unused_settings(config)
    }


def _axis(text: str) -> tuple[str, list[str]]:
    """The setting that varies, and its values."""
    name, _, values = text.partition("=")
    split = [value.strip() for value in values.split(",")]
    if not all(split):
        raise ValueError(f"--vary must be NAME=VALUE,VALUE,..., got {text!r}")
    if name.strip() == "seed":
        raise ValueError("seeds are given with --seeds")
    return name.strip(), split


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers with commas, got {text!r}") from None


def _short(name: str, axes: dict[str, list[str]]) -> str:
    """A setting's last name, where no other setting that varies has the same."""
    last = name.rpartition(".")[2]
    return last if sum(n.rpartition(".")[2] == last for n in axes) == 1 else name


def _safe(value: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", value)
