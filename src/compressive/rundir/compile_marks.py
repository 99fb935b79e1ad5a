"""Marks in the compile cache: settings whose steps were compiled on this machine before."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compressive.config import Config

COMPILE_CACHE = "COMPRESSIVE_COMPILE_CACHE"
CACHE_OFF = ("0", "no", "off")
_MARK = "step-"


def default_root() -> Path:
    """Return the folder of all compile caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "compressive" / "compile"


def mark_name(config: Config) -> str:
    """Return the name of the file that tells that the step of these settings was compiled."""
    train = config.train
    parts: list[Any] = [asdict(each) for each in (config.views, config.network, config.bottleneck)]
    parts += [asdict(config.decoder), config.method, config.data.source, train.precision]
    parts += [train.batch_size, train.grad_accum_steps, train.activation_checkpointing]
    parts += [train.fused_norm]
    text = json.dumps(parts, sort_keys=True, default=str)
    return f"{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def may_need_compiling(config: Config, *, is_complete: bool) -> bool:
    """Return whether steps may have to be compiled, without importing torch.

    If the settings are not complete yet, the answer is yes on a machine that never compiled.
    """
    if config.train.compile == "no" or config.train.device == "cpu":
        return False
    wanted = os.environ.get(COMPILE_CACHE, "")
    if wanted.lower() in CACHE_OFF:
        return False  # the process would not know where to put the code
    try:
        root = Path(wanted or default_root()).expanduser()
    except RuntimeError:  # there is no home directory
        return False
    name = mark_name(config) if is_complete else f"{_MARK}*"
    return not any(root.glob(f"*/{name}"))
