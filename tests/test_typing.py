"""mypy and pyright resolve the public names, although the package imports them lazily."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PROGRAM = """from compressive import VonMisesFisher, load, pretrain

reveal_type(VonMisesFisher)
reveal_type(load)
reveal_type(pretrain)
"""
MYPY = """[mypy]
ignore_missing_imports = True
follow_imports = silent
[mypy-{skipped}]
follow_imports = skip
follow_imports_for_stubs = True
"""
# Packages that compressive imports. To analyze them takes most of the time, and none defines
# the public names.
SKIPPED = "torch torchvision timm numpy PIL safetensors rich jaxtyping pyarrow wandb mlflow trackio"
SKIPPED += (
    " transformers huggingface_hub onnx onnxruntime onnxscript tensorboard typer click jinja2"
)
SKIPPED += " faiss pillow_heif torchcodec datasets"


def revealed(checker: str, folder: Path) -> list[str]:
    """Return the types that a checker reveals in PROGRAM."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "mypy.ini").write_text(
        MYPY.format(skipped=",".join(f"{name}.*" for name in SKIPPED.split()))
    )
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SOURCE)]}))
    options = {
        "mypy": ["--config-file", "mypy.ini", "--cache-dir", "cache"],
        "pyright": ["--pythonpath", sys.executable],
    }
    run = subprocess.run(
        [sys.executable, "-m", checker, *options[checker], "program.py"],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return re.findall(r'(?:Revealed type is|Type of "\w+" is) "(.*)"$', run.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_resolve_public_names(checker: str, tmp_path: Path) -> None:
    distribution, load, pretrain = revealed(checker, tmp_path)
    assert "VonMisesFisher" in distribution
    assert "Encoder" in load
    assert "Config" in pretrain


def test_package_is_marked_as_typed() -> None:
    assert (SOURCE / "compressive" / "py.typed").exists()
