"""Settings of a fine-tuning run, and finetune.json, which stores them and the search."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compressive.config import (
    FINETUNE_METHOD,
    Config,
    channels_text,
    flat,
    override,
    total_steps,
)
from compressive.distributed import rank, wait_for_all, world_size
from compressive.encoder import Encoder
from compressive.rundir.files import CONFIG, FINETUNE, write_text
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, check_format

BYOL_RATES = (0.1, 0.05, 0.02, 0.01, 0.005)  # for batches of 256 images
# Smaller data sets have smaller batches, for which the rate is scaled down, and fewer steps.
SMALL_SET_RATES = (0.8, 0.4, 0.2, 0.1, 0.05)
DEFAULT_RATE = 0.2  # used if too few labels can be held out
_STEPS_PER_EPOCH = 12  # as with batches of 1024 on 1 % of ImageNet
_SHORT_RUN = 1000  # steps below which compilation takes longer than it saves
# Settings that follow from the encoder, the labels and the protocol.
_DETERMINED = ("method", "seed", "data.source", "data.split", "data.labels", "data.limit")
_DETERMINED += ("views.size", "views.policy", "views.mean", "views.std", "optim.lr")
_DETERMINED += ("probe.holdout", "train.epochs", "train.steps", "train.batch_size")


def default_epochs(share: float) -> int:
    """Return the epochs of SimCLR: 60 for 1 % of the labels, 30 for 10 % or more."""
    return 60 if share <= 0.02 else 30


def default_batch_size(count: int) -> int:
    """Return a power of 2 with about 12 steps per epoch, from 16 to 1024, for all processes."""
    size = 16
    while size < 1024 and 2 * size * _STEPS_PER_EPOCH <= count:
        size *= 2
    least = 2 * world_size()
    return max(min(size, count // least * least), least)


def build_config(
    encoder: Encoder,
    place: str,
    *,
    count: int,
    epochs: int,
    batch_size: int,
    seed: int,
    device: str,
    precision: str,
    settings: Sequence[str] = (),
) -> Config:
    """Return the settings of a run except its learning rate.

    SGD with Nesterov momentum, no weight decay, no warm-up, cosine schedule. Collapse detection is
    off: the features of two well separated classes are nearly on a line.
    """
    is_short = total_steps(count, epochs, batch_size) < _SHORT_RUN
    base = override(
        replace(Config(), network=replace(encoder.settings, weights="")),
        f"method={FINETUNE_METHOD}",
        f"seed={seed}",
        f"data.source={place}",
        f"views.size={encoder.size}",
        "views.policy=crop",
        f"views.antialias={encoder.antialias}",
        f"views.mean={channels_text(encoder.mean)}",
        f"views.std={channels_text(encoder.std)}",
        "optim.name=sgd",
        "optim.nesterov=true",
        "optim.weight_decay=0",
        "optim.warmup_epochs=0",
        f"train.epochs={epochs}",
        f"train.batch_size={batch_size}",
        f"train.device={device}",
        f"train.precision={precision}",
        f"train.compile={'no' if is_short else 'auto'}",
        "probe.holdout=0",
        "health.collapse_std=0",
        "health.min_participation_ratio=0",
    )
    config = override(base, *settings)
    old, new = flat(base), flat(config)
    for name in old:
        if old[name] != new[name] and (name in _DETERMINED or name.startswith("network.")):
            hint = "the encoder, the data and the options of finetune determine it"
            raise ValueError(f"{name} cannot be set here, got {new[name]}; {hint}")
    return config


@dataclass
class Plan:
    """Content of finetune.json: what is trained, and the scores of the search so far."""

    about: dict[str, Any]  # what must stay the same to resume
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)  # by learning rate
    chosen: float | None = None

    def write(self, out: Path) -> None:
        """Write finetune.json, in the first process only."""
        if rank() == 0:
            content = {"about": self.about, "search": self.scores, "chosen": self.chosen}
            text = json.dumps({FORMAT_KEY: FORMAT_VERSIONS[FINETUNE], **content}, indent=2)
            write_text(out / FINETUNE, text + "\n")


def open_plan(out: Path, about: dict[str, Any]) -> Plan:
    """Return the plan of a folder to resume, or write a new one."""
    if rank() == 0 and not (out / FINETUNE).is_file():
        if (out / CONFIG).exists() or (out.is_dir() and any(out.iterdir())):
            raise ValueError(
                f"{out} is not empty and holds no fine-tuning run; choose another --out"
            )
        Plan(about).write(out)
    wait_for_all()
    plan = _read_plan(out / FINETUNE)
    changed = [name for name, value in about.items() if plan.about.get(name) != value]
    changed = [name for name in changed if name != "encoder"]  # its weights count, not its place
    if changed:
        name = changed[0]
        was = f"{name} {plan.about.get(name)}, not {about[name]}"
        if name in ("weights", "images"):
            was = {"weights": "another encoder", "images": "other images"}[name]
        raise ValueError(
            f"{out} holds a fine-tuning run with {was}; give the same options to resume it, or "
            "choose another --out"
        )
    return plan


def _read_plan(path: Path) -> Plan:
    try:
        content = json.loads(path.read_bytes())
        check_format(path, FINETUNE, content.get(FORMAT_KEY))
        scores = {str(k): dict(v) for k, v in content["search"].items()}
        chosen = content["chosen"]
        return Plan(dict(content["about"]), scores, None if chosen is None else float(chosen))
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
