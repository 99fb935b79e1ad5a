"""Check the layers, file sizes and import cost of the package, and docs/architecture.md."""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "compressive"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_package_root_has_at_most_18_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 18


# All settings are in one file, the four losses share terms and result types, and an operation of
# the paper's table of augmentations or a function of the distribution is best read with the others.
LONG_FILES = {"config.py", "objectives.py", "ops.py", "vmf.py"}


def test_few_files_are_longer_than_300_lines() -> None:
    assert {p.name for p in MODULES if len(p.read_text().splitlines()) > 300} <= LONG_FILES


def test_no_module_has_a_generic_name() -> None:
    forbidden = {"utils", "helpers", "common", "misc", "base", "v2", "new"}
    assert not forbidden & {path.stem for path in MODULES}


# --- layers -------------------------------------------------------------------------------------


def lint_imports(source: Path) -> subprocess.CompletedProcess[str]:
    """Run the contract of pyproject.toml on the package `compressive` in the folder `source`."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import importlinter.cli as cli; "
    code += "cli.lint_imports_command()"
    arguments = ["--no-cache", "--no-logo", "--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [sys.executable, "-c", code, str(source), *arguments],
        cwd=source,
        capture_output=True,
        text=True,
    )


def test_packages_import_only_from_lower_layers() -> None:
    run = lint_imports(PACKAGE.parent)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("rundir/files.py", "import compressive.cli.app", "compressive.rundir.files"),
        ("data/decode.py", "from compressive.corruptions import NAMES", "compressive.data.decode"),
        ("new_module.py", "", "new_module"),
    ],
    ids=["upward import", "import within a layer", "module without a layer"],
)
def test_layers_contract_detects_violations(
    tmp_path: Path, path: str, line: str, found: str
) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "compressive", ignore=shutil.ignore_patterns("*.safetensors")
    )
    with (tmp_path / "compressive" / path).open("a") as file:
        file.write(f"\n{line}\n")
    run = lint_imports(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert found in run.stdout


def torch_distributed_in(source: str) -> bool:
    """Return whether a source text imports torch.distributed."""
    if "distributed" not in source:  # parsing all files takes a second
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            return True
    return False


def test_only_distributed_imports_torch_distributed() -> None:
    found = {p.parent.name for p in MODULES if torch_distributed_in(p.read_text())}
    assert found == {"distributed"}
    assert torch_distributed_in("from torch.distributed import all_reduce")
    assert torch_distributed_in("from torch import distributed")
    assert not torch_distributed_in("from torch.distributions import Normal")


# --- docs/architecture.md -----------------------------------------------------------------------


@functools.cache
def definitions(path: Path) -> set[str]:
    """Return the top-level names of a module and `Class.method` for its methods."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for name in inside}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def named_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each file that a table row names, with the names that follow it in the row."""
    for row in re.findall(r"^\|.*\|$", text, flags=re.MULTILINE):
        parts = re.split(r"`([\w/]+\.(?:py|jinja|html\.jinja))`", row)
        for file, rest in zip(parts[1::2], parts[2::2], strict=True):
            yield file, re.findall(r"`([A-Za-z_][\w.]*)`", rest)


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def missing(text: str) -> list[str]:
    """Return the files and names of a text that do not exist."""
    found = []
    for file, names in named_in(text):
        path = PACKAGE / file
        if not path.exists():
            found.append(file)
        elif path.suffix == ".py":
            known = definitions(path)
            found += [f"{file}: {name}" for name in names if name not in known]
    return found


def test_files_and_functions_in_the_architecture_document_exist() -> None:
    assert missing(ARCHITECTURE) == []
    assert missing("| `rng.py` | `threefry`, `nothing` |") == ["rng.py: nothing"]
    assert missing("| x | `nothing.py` |") == ["nothing.py"]


def test_training_path_has_at_most_20_files() -> None:
    files = {file for file, _ in named_in(section("From an image to a loss to a checkpoint"))}
    assert 10 <= len(files) <= 20


def test_architecture_document_describes_every_package() -> None:
    described = set(re.findall(r"^\*\*`([\w/]+)`\*\*", section("Packages"), flags=re.MULTILINE))
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert described == packages


def test_architecture_document_names_every_root_module() -> None:
    table = {file for file, _ in named_in(section("Modules at the root"))}
    assert table == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}


# --- imports ------------------------------------------------------------------------------------

LIGHT = "import {}, sys; print([m for m in {} if m in sys.modules])"


def test_imports_are_light() -> None:
    """The command line must not import torch; objectives must not import torch's compiler (6 s)."""
    heavy = ["scipy", "timm", "torch._dynamo", "torch._inductor", "matplotlib"]

    def loaded(modules: str, *more: str) -> str:
        code = LIGHT.format(modules, [*heavy, *more])
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    # The check can fail: the command line uses typer.
    assert loaded("compressive.cli.app", "torch", "typer") == "['typer']"
    assert loaded("compressive.objectives, compressive.distributions.vmf", "typer", "rich") == "[]"


def test_package_exports_its_public_names() -> None:
    import compressive
    from compressive.distributions.uniform import HypersphericalUniform
    from compressive.distributions.vmf import VonMisesFisher
    from compressive.evaluation.frozen_model import load_encoder

    assert compressive.load is load_encoder
    assert compressive.HypersphericalUniform is HypersphericalUniform
    assert compressive.VonMisesFisher is VonMisesFisher
    assert compressive.metrics.__name__ == "compressive.metrics"
    with pytest.raises(AttributeError, match="nothing"):
        _ = compressive.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_diagram_shows_the_layers_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [set(layer.split(" | ")) for layer in contract["contracts"][0]["layers"]]
    diagram = ARCHITECTURE.partition("```text\n")[2].partition("```")[0]
    rows: list[str] = []
    for line in diagram.splitlines():
        names = re.split(r" {3,}", line.strip())[0].removeprefix("└ ")
        rows = [*rows[:-1], rows[-1] + names] if rows and rows[-1].endswith("│") else [*rows, names]
    assert [set(re.findall(r"\w+", row)) for row in rows] == layers[1:]  # without __main__
