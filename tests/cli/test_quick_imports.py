"""Commands do not import wandb through timm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("is_skipped", [True, False])
def test_timm_does_not_import_wandb_in_a_command(tmp_path: Path, is_skipped: bool) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/__init__.py").write_text("planted = True\n")
    start = "from compressive.cli.quick_imports import skip_wandb_in_timm as skip; skip(); skip(); "
    code = "import sys, timm; print('wandb' in sys.modules); import wandb; print(wandb.planted)"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", (start if is_skipped else "") + code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(not is_skipped), "True"]
