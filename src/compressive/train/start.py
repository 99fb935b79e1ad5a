"""Start a run from a data source and the options of the command line."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compressive import recipes
from compressive.config import Config, flat, from_dict, override, unused_settings, with_data
from compressive.data.location import ImageData
from compressive.data.several import drop_labels, is_path, place_of
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.distributed import rank
from compressive.methods import Builder, build
from compressive.progress import Display
from compressive.recipes.options import as_changes
from compressive.rundir.files import CONFIG, local_path
from compressive.rundir.folder import FREE, read_config, recorded_given
from compressive.rundir.places import absolute_places, short_name
from compressive.train import loop
from compressive.train.auto_config import auto_config
from compressive.train.callbacks import Callback, LogFunction
from compressive.train.initial_weights import following_settings
from compressive.train.outcome import Outcome
from compressive.train.remote_out import mirrored_run

# Settings that must stay the same if a run is continued, and those of the network.
_UNCHANGEABLE = {
    "method",
    "data.split",
    "data.limit",
    "data.labels",
    "optim.name",
    "train.batch_size",
    "train.parallel",
}


def pretrain(
    data: ImageData | Config,
    out: str | Path | None = None,
    *,
    recipe: str = "",
    method: str | Builder | None = None,
    backbone: str | None = None,
    weights: str | Path | None = None,
    image_size: int | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    labels: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    track: str | None = None,
    settings: Sequence[str] = (),
    resume: bool = True,
    continue_from: str | Path | None = None,
    source: ImageData | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback | LogFunction] = (),
) -> Outcome:
    """Train an encoder on images without labels; the arguments are those of the command line.

    `data` is a folder or another source of images, a list of several, a Python object such as a
    torch `Dataset` (see docs/formats.md), or a complete `Config`. Without a recipe,
    settings are chosen from the images and the machine. `settings` are further changes, such as
    "bottleneck.beta=0.1", which the command line takes as `--set`. `out` is the folder of the run,
    or an address such as s3://BUCKET/FOLDER, to which a local folder is mirrored (docs/storage.md).

    Resume if that folder holds an unfinished run with the same settings. `continue_from` starts a
    new run from the last checkpoint of another run, with its settings as the base.

    `weights` are trained weights that the encoder starts from: a run, a file, a timm name with its
    tag, an `hf-hub:` id or a folder of timm (see docs/weights.md). The network and the size of
    views follow from them. Heads start from random weights.

    In Python, `source` can replace data.source of a `Config` by images of any kind, and `method`
    can be a function that builds a method (see docs/extend.md). `callbacks` are functions
    `f(step, metrics)` or objects of `Callback` (see docs/training-loops.md).
    """
    options = {
        "method": method if isinstance(method, str) else None,
        "backbone": backbone,
        "weights": weights,
        "image_size": image_size,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "labels": labels,
        "device": device,
        "precision": precision,
        "workers": workers,
        "track": track,
    }
    given = as_changes(options, settings)
    if source is not None and not isinstance(source, Source):
        split = (data if isinstance(data, Config) else override(Config(), *given)).data.split
        source = open_source(source, split)
    if not isinstance(data, Config):
        data, source = _open_python_data(data, source, given)
    display = display or Display(quiet=rank() > 0)
    with mirrored_run(out, display.say) as place:
        return _pretrain_planned(
            plan_pretraining(
                data, place, given, recipe=recipe, continue_from=continue_from, source=source
            ),
            given,
            display,
            resume=resume,
            continue_from=continue_from,
            source=source,
            callbacks=callbacks,
            method=build if method is None or isinstance(method, str) else method,
        )


def _pretrain_planned(
    plan: tuple[Config, Path, dict[str, str]],
    given: Sequence[str],
    display: Display,
    **options: Any,
) -> Outcome:
    """Print notes on the settings of a run, and train."""
    config, folder, reasons = plan
    names = list(dict.fromkeys(change.partition("=")[0].strip() for change in given))
    unused = unused_settings(config)
    for name in filter(unused.__contains__, names):
        display.say(f"note: {name} has no effect here: {unused[name]}")
    for name, reason in reasons.items():
        if name not in names and name not in unused:
            display.say(f"{name} = {flat(config)[name]}: {reason}")
    return loop.pretrain(config, folder, given=names, display=display, **options)


def _open_python_data(
    data: ImageData, source: Source | None, given: Sequence[str]
) -> tuple[str, Source | None]:
    """Return the value of data.source, and the source if images are Python objects."""
    place = place_of(data)
    if is_path(data) or source is not None:
        return place, source
    wanted = override(Config(), *given).data
    found = open_source(data, wanted.split, max_pixels=wanted.max_pixels)
    return place, drop_labels(found) if wanted.labels == "none" else found


def plan_pretraining(
    data: str | Path | Config,
    out: str | Path | None,
    given: Sequence[str],
    *,
    recipe: str = "",
    continue_from: str | Path | None = None,
    source: Source | None = None,
) -> tuple[Config, Path, dict[str, str]]:
    """Return settings and folder of a run, and the reasons of settings for continued pretraining.

    Raise ValueError for settings that do not fit.
    """
    bases = {"a Config": isinstance(data, Config), "recipe": recipe, "continue_from": continue_from}
    if len(several := [name for name, value in bases.items() if value]) > 1:
        raise ValueError(f"{several[0]} and {several[1]} both choose the settings; give one")
    place = data.data.source if isinstance(data, Config) else str(data)
    if isinstance(data, Config):
        config = override(data, *given)
        return config, _folder(config, place, out), {}
    names = {change.partition("=")[0].strip() for change in given}
    if continue_from is not None:
        if "network.weights" in names:
            raise ValueError("--weights and --continue-from both choose the weights; give one")
        before = read_config(local_path(continue_from))
        config = with_data(before, place, *given)
        _check_continues(config, before, continue_from)
        return config, _folder(config, place, out), {}
    base = recipes.get(recipe).config if recipe else Config()
    wanted = with_data(base, place, *given)
    folder = _folder(wanted, place, out)
    weights = following_settings(wanted, sorted(names), folder)
    follows = [f"{name}={value}" for name, value in weights.items()]
    if recipe:
        return with_data(base, place, *follows, *given), folder, {}
    made = auto_config(place, given, source, weights)
    config = with_data(made.config, place, *follows, *given)
    config = _as_derived_before(config, folder, names)
    reasons = {name: made.origins[name] for name in recipes.SHOWN} if weights else {}
    return config, folder, reasons


def _as_derived_before(config: Config, folder: Path, given: set[str]) -> Config:
    """Return the config with the settings that were derived when the run in a folder started.

    Another version of this package or another machine may derive others, and would not resume it.
    Runs with other images or other `given` settings are left to `open_folder`, which explains them.
    """
    if not (folder / CONFIG).exists():
        return config
    before = read_config(folder)
    old, new, nested = flat(before), flat(config), asdict(config)
    is_same = before.data.source == absolute_places(config.data.source)
    is_same &= all(old[name] == new[name] for name in given - FREE)
    if before.recipe != recipes.AUTO or not is_same:
        return config
    for name in old.keys() - FREE - given - {*recorded_given(folder), "data.source"}:
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = old[name]
    return from_dict(nested)


def _folder(config: Config, place: str, out: str | Path | None) -> Path:
    """Return the folder of a run: `out`, or one named after the settings and the images."""
    name = config.recipe.replace("/", "-")
    name = config.method if name in ("", recipes.AUTO) else name
    return local_path(out or Path("runs") / f"{name}-{short_name(place)}-seed{config.seed}")


def _check_continues(config: Config, before: Config, run: str | Path) -> None:
    """Raise ValueError if the weights or the steps of a run have another meaning in the new one."""
    old, new = flat(before), flat(config)
    for name in old:
        is_fixed = name in _UNCHANGEABLE or name.startswith("network.")
        if is_fixed and old[name] != new[name]:
            raise ValueError(
                f"{name} must be {old[name]}, as in {run}, to continue it, got {new[name]}"
            )
