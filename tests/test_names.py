"""No two top-level definitions share a name for different concepts; public names are declared."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "compressive"

SAME_CONCEPT = {
    "__all__": "the public names of a module",
    "pretrain": "train from a data source and options (compressive.pretrain), or from a config",
    "main": "start of a process: the program, and the worker that calls a tracker",
    "build": "make an object from settings: a network, a method, a section of the config",
    "run": "the function of an evaluation task, one in each file of evaluation/tasks",
    "Labels": "type alias: one class index per image",
    "Loader": "type alias: a resident or a streaming loader",
    "names": "the names that a registry offers: recipes.names, weights.names",
    "find": "look an entry up by name: weights.find, settings_reference.find",
    "load": "read an encoder (compressive.load) or a checkpoint from a file",
    "save": "write an encoder or a checkpoint to a file",
    "Health": "health settings in config; the monitor that applies them",
    "check": "part of an export format: refuse a network that it cannot represent",
    "write": "part of an export format: write the network",
    "outputs": "part of an export format: load what was written and compute outputs",
    "usage": "part of an export format: the Python code that loads the export",
    "neighbors": "similar images: the search, and its rows in the report",
    "brightness": "augmentation with a drawn factor; ImageNet-C corruption of the same name",
    "contrast": "augmentation with a drawn factor; ImageNet-C corruption of the same name",
    "gaussian_blur": "augmentation with a drawn sigma; ImageNet-C corruption of the same name",
}


@functools.cache
def defined(source: str) -> set[str]:
    """Return the names that a module defines at its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each for target in targets for each in ast.walk(target)]
            found |= {each.id for each in names if isinstance(each, ast.Name)}
    return found


def duplicates(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return each name that several modules define, with the modules."""
    places = defaultdict(list)
    for module, source in sources.items():
        for name in defined(source):
            places[name].append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


SOURCES = {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}


def test_names_are_not_reused_for_different_concepts() -> None:
    found = {name: where for name, where in duplicates(SOURCES).items() if name not in SAME_CONCEPT}
    assert not found, f"rename, or add to SAME_CONCEPT with a reason: {found}"


def test_exceptions_are_actual_duplicates() -> None:
    assert SAME_CONCEPT.keys() <= duplicates(SOURCES).keys()


def test_duplicate_names_are_found() -> None:
    sources = {"a.py": "def f(): ...\nX, Y = 1, 2", "b.py": "class f: ...\nY: int = [i for i in 3]"}
    assert duplicates(sources) == {"Y": ["a.py", "b.py"], "f": ["a.py", "b.py"]}
