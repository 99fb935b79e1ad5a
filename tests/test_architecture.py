"""The house: imports point down, the documents tell the truth, the import is quick."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "compressive"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

# A module imports only from floors below its own, never from its own.
FLOORS = [
    "inputs special radial distributed views config paper files display pace lock signals "
    "shipped data.answers data.builtin data.decode data.flow data.labelmaps "
    "corruptions.tables report.figures",
    "vmf contrast optim metrics augment networks syncbn controller recipes folder newton journal "
    "checkpoint data.layouts data.pictures data.plan data.videos corruptions.filters "
    "evaluation.robustness evaluation.tsne report.reading settings",
    "ablations objectives uniform monitor schedule encoder logistic data.loaders data.shards "
    "data.shifts data.splits data.torchvision_sets corruptions.noise corruptions.blur "
    "corruptions.digital corruptions.jpeg evaluation.linear evaluation.published "
    "report.gallery report.tables report.outcome watch",
    "methods online probes meter tally data.sources data.transfer_files corruptions.weather "
    "corruptions.spatter evaluation.results evaluation.features evaluation.smoothness "
    "report.ablation",
    "learner images data.transfer corruptions.catalog evaluation.information evaluation.subject "
    "evaluation.scores evaluation.compare evaluation.opening report.page",
    "run embed evaluation.exam evaluation.tables",
    "train terminal evaluation.classify",
    "evaluation.gallery evaluation.probing evaluation.shifted",
    "evaluation.suite",
    "sweep quickstart",
    "commands",
    "cli",
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
SUBPACKAGES = {f"compressive.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
DOORS = {"__init__", "__main__"}  # they only pass on what others hold
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem not in DOORS]


def test_a_long_file_says_why_and_a_short_one_does_not() -> None:
    for path in MODULES:
        text = path.read_text()
        reason = "Longer than 300 lines" in (ast.get_docstring(ast.parse(text)) or "")
        assert reason == (len(text.splitlines()) > 300), path


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(source: str) -> set[str]:
    """Modules of the package that a source text imports, wherever in the text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "compressive" or node.module in SUBPACKAGES:
                inside = node.module.removeprefix("compressive").lstrip(".")
                found |= {".".join(filter(None, (inside, alias.name))) for alias in node.names}
            elif node.module and node.module.startswith("compressive."):
                found.add(node.module.removeprefix("compressive."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {n.removeprefix("compressive.") for n in names if n.startswith("compressive.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    name = module_name(path)
    assert name in FLOOR_OF, f"give {name} a floor"
    above = {other for other in imports(path.read_text()) if FLOOR_OF[other] >= FLOOR_OF[name]}
    assert not above, f"{name} (floor {FLOOR_OF[name]}) may not import {sorted(above)}"


def test_the_check_above_can_fail() -> None:
    source = (
        "from compressive import vmf\nimport compressive.cli\n"
        "def f():\n    from compressive.optim import LARS"
    )
    assert imports(source) == {"vmf", "cli", "optim"}


def torch_distributed_in(source: str) -> bool:
    """Whether a source text imports torch.distributed (torch.distributions is another thing)."""
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
    assert [p.stem for p in MODULES if torch_distributed_in(p.read_text())] == ["distributed"]
    assert torch_distributed_in("from torch.distributed import all_reduce")
    assert torch_distributed_in("from torch import distributed")
    assert not torch_distributed_in("from torch.distributions import Normal")


def test_architecture_document_lists_the_modules() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)\.py` ", ARCHITECTURE, flags=re.MULTILINE))
    assert {name.replace("/", ".") for name in listed} == {module_name(path) for path in MODULES}
    floors = dict(re.findall(r"^\| `([\w/]+)\.py` \| (\d+) ", ARCHITECTURE, flags=re.MULTILINE))
    assert {name.replace("/", "."): int(floor) for name, floor in floors.items()} == FLOOR_OF


def test_no_module_has_a_name_that_invites_everything() -> None:
    forbidden = {"utils", "helpers", "common", "misc", "base", "v2", "new"}
    assert not forbidden & {path.stem for path in MODULES}


LIGHT = "import {}, sys; print([m for m in {} if m in sys.modules])"


def test_imports_load_no_more_than_they_need() -> None:
    """A help text waits for no torch; the objectives for no compiler, which takes six seconds."""
    heavy = ["scipy", "timm", "torch._dynamo", "torch._inductor", "matplotlib"]

    def loaded(modules: str, *more: str) -> str:
        code = LIGHT.format(modules, [*heavy, *more])
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert loaded("compressive.cli", "torch") == "[]"
    assert loaded("compressive.objectives, compressive.vmf", "typer", "rich") == "[]"
    assert "typer" in loaded("compressive, typer", "typer"), "the check can fail"


def test_the_package_hands_out_what_it_promises() -> None:
    import compressive
    from compressive.distributions.uniform import HypersphericalUniform
    from compressive.distributions.vmf import VonMisesFisher
    from compressive.encoder import load

    assert compressive.load is load
    assert compressive.HypersphericalUniform is HypersphericalUniform
    assert compressive.VonMisesFisher is VonMisesFisher
    assert compressive.metrics.__name__ == "compressive.metrics"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compressive.nothing  # pyright: ignore[reportAttributeAccessIssue]
