"""Light commands do not import torch, and invalid input is rejected before torch is imported."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compressive.cli
from compressive.config import Config, override
from compressive.evaluation.results import Results
from compressive.rundir.folder import write_config

HEAVY = ("torch", "torchvision", "timm", "scipy", "matplotlib", "pyarrow")
# Run command lines in one process, and print each exit code and the imported heavy modules.
PROGRAM = """
import json, sys
from compressive.cli.app import app
for line in json.loads(sys.argv[1]):
    try:
        app(line)
    except SystemExit as stop:
        code = stop.code
    print("RESULT", json.dumps([code, [name for name in {heavy} if name in sys.modules]]))
"""
LIGHT = ["--help", "--version", "recipes", "recipes c-simclr/quickstart", "settings optim"]
WRONG = [
    "recipes typo",
    "settings typo",
    "pretrain builtin --recipe typo",
    "pretrain builtin --nonsense",
    "pretrain builtin --set optim.lrr=1",
    "pretrain builtin --set optim.lr=-1",
    "pretrain builtin --set train.device=gpu",
    "pretrain builtin --recipe simclr/quickstart --set optim.lrr=1",
    "pretrain builtin --recipe simclr/quickstart --steps -1",
    "evaluate run --tasks nonsense",
    "evaluate run --suite nonsense",
    "evaluate run --max-images -1",
    "evaluate run --device gpu",
    "embed run images --size -1",
    "finetune run images --device gpu",
    "finetune run images --seed -1",
    "finetune run images --labels 0%",
    "finetune run images --epochs 0",
    "finetune run images --set optim.lrr=1",
    "predict run images --device gpu",
    "quickstart --seed -1",
    "meter --dim 1",
    "sweep builtin",
    "sweep builtin --preset nonsense",
    "sweep builtin --vary optim.lrr=1,2",
    "sweep builtin --vary optim.lr=1,-1",
    "sweep builtin --vary optim.lr=1,2 --tasks nonsense",
    "sweep builtin --vary optim.lr=1,2 --suite nonsense",
    "sweep builtin --vary optim.lr=1,2 --at-once 0",
    "sweep builtin --vary optim.lr=1,2 --at-once many",
    "sweep builtin --vary optim.lr=1,2 --jobs 0",
    "pretrain nowhere",
    "sweep nowhere --vary optim.lr=1,2",
    "evaluate run --data nowhere",
    "embed run nowhere",
    "embed runs/nowhere builtin",
    "evaluate runs/nowhere",
    "export runs/nowhere --to timm --out exported",
    "finetune encoder.pth builtin",
    "finetune run nowhere",
    "predict runs/nowhere builtin",
    "report nowhere",
    "watch nowhere",
]


def invoke(lines: list[str], folder: Path) -> list[tuple[int, list[str]]]:
    """Return the exit code of each line and the heavy modules imported so far."""
    program = [sys.executable, "-c", PROGRAM.replace("{heavy}", repr(HEAVY))]
    words = json.dumps([line.split() for line in lines])
    done = subprocess.run([*program, words], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [tuple(json.loads(line.removeprefix("RESULT "))) for line in found]


def test_help_recipes_settings_report_and_watch_import_no_torch(tmp_path: Path) -> None:
    for name, config in (("run", Config()), ("other", override(Config(), "bottleneck.beta=2"))):
        write_config(tmp_path / name, config, torch.device("cpu"))
        results = Results(name)
        results.add("knn", "set", "top-1", torch.rand(30), protocol={}, images="same")
        results.write(tmp_path / name / "evaluation")
    lines = [*LIGHT, "report run other", "watch run --once"]
    for line, (code, heavy) in zip(lines, invoke(lines, tmp_path), strict=True):
        assert (code, heavy) == (0, []), line
    assert "undecided" in (tmp_path / "report.html").read_text()


def test_invalid_input_is_rejected_before_importing_torch(
    tmp_path: Path,
) -> None:
    for line, (code, heavy) in zip(WRONG, invoke(WRONG, tmp_path), strict=True):
        assert (code, heavy) == (2, []), line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_torch_import_is_detected(tmp_path: Path) -> None:
    """The checks above can fail."""
    ((code, heavy),) = invoke(["meter --dim 4 --batch 2"], tmp_path)
    assert code == 0
    assert "torch" in heavy


def test_options_with_a_metavar_state_their_name() -> None:
    """Without a name, typer 0.27 uses the metavar as the option's name: `--TASKS`."""
    for path in Path(compressive.cli.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "typer.Option":
                has_metavar = any(keyword.arg == "metavar" for keyword in call.keywords)
                assert call.args or not has_metavar, f"{path.name}:{call.lineno}"
