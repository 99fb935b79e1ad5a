"""Run the commands and Python of all documents, and check their links.

Fences: `python` and `bash` are run here, in the order of the document and in one folder for each
document. `sh` is run by test_readme.py exactly as written. `text`, `json` and `bibtex` are not
commands. For `bash`, the data that a command names are generated, settings appended to the command
make runs tiny, a sweep keeps one value of each setting, and torchrun has two processes.
"""

import io
import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import typer
from documents import DOCUMENTS, ROOT
from processes import together
from tensorflow_files import ENDING, official_tensors, write_bundle
from tiny import CHANGES, noise
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import Config, override
from compressive.networks import backbone
from compressive.recipes.options import option_of
from compressive.rundir.places import join_places
from compressive.sweep.plan import PlannedRun, plan_runs

DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md"))]
NOT_RUN = ("text", "json", "bibtex")
# The network is replaced by the smallest, which lacks options that only larger ones have.
SMALL = [*CHANGES, "network.stem=imagenet", "network.variant=timm"]
RESNET = [*SMALL, "network.name=resnet18"]  # for snippets that load it elsewhere
PROGRAM: Any = typer.main.get_command(app)  # a Group of click or of typer's copy


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


class Block(NamedTuple):
    """The content of a fenced block."""

    language: str
    text: str


def fenced(text: str) -> list[Block]:
    found = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(language.strip(), inside) for language, inside in found]


def lines(script: str) -> list[list[str]]:
    """Return the words of each command, without comments and with continued lines joined."""
    whole = script.replace("\\\n", " ").splitlines()
    return [words for line in whole if (words := shlex.split(line, comments=True))]


# --- inputs of commands -------------------------------------------------------------------------


def put_images(folder: Path, classes: int = 3, each: int = 8) -> None:
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(each):
            noise(100, 120, seed=100 * label + i).save(
                folder / f"class{label}" / f"{label}-{i}.png"
            )


def put_parquet(folder: Path) -> None:
    """Write CIFAR-10 in the layout of Hugging Face."""
    folder.mkdir(parents=True)
    for split, count in (("train", 24), ("test", 12)):
        cells = []
        for seed in range(count):
            file = io.BytesIO()
            noise(32, 32, seed=seed).save(file, "PNG")
            cells.append({"bytes": file.getvalue(), "path": f"{seed}.png"})
        table = pa.table({"img": cells, "label": [i % 3 for i in range(count)]})
        names = {"label": {"_type": "ClassLabel", "names": ["a", "b", "c"]}}
        about = {"huggingface": json.dumps({"info": {"features": names}})}
        place = folder / f"{split}-00000-of-00001.parquet"
        pq.write_table(table.replace_schema_metadata(about), place)


def generate_images(place: str) -> str:
    """Create images under that name in the current folder and return the path."""
    assert "torchvision:" not in place, "commands in documents must not need a network"
    if place == "builtin":
        return place
    path = Path(place.lstrip("/"))
    if not path.exists():
        if "cifar" in path.name:
            put_parquet(path)
        elif "imagenet" in path.name:
            put_images(path / "train")
            put_images(path / "val", each=2)
        else:
            put_images(path)
    return str(path)


def put_checkpoint(folder: Path) -> None:
    """Write a TensorFlow checkpoint of a ResNet-18 with a linear classifier."""
    network = backbone("resnet18", variant="official")
    head = "model/supervised_head/linear_layer/dense"
    kernel, bias = np.ones((512, 3), np.float32), np.ones(3, np.float32)
    weights = official_tensors(network, (2, 2, 2, 2), **{f"{head}/kernel": kernel})
    write_bundle(folder / "ckpt-1", weights | {f"{head}/bias{ENDING}": bias})


def small(words: list[str], changes: list[str]) -> list[str]:
    """Shorten a command to seconds: other data, fewer steps, fewer values."""
    name, *rest = words
    if name == "pretrain":
        count = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
        places, options = [*map(generate_images, rest[:count])], rest[count:]
        if "--weights" in options:  # network and size follow from the weights
            changes = [each for each in CHANGES if not each.startswith(("network.", "views."))]
            changes.append("train.batch_size=4")  # their networks are large
        if "--continue-from" in options:
            changes = [each for each in CHANGES if each.startswith("train.device")]
        return [name, *places, *_without(options, changes), *_sets(*changes)]
    if name == "finetune":
        encoder, data, *options = rest
        options = _without(options, ["train.epochs=1"])
        if "--labels" in options:  # 1 % of a few images would not cover the classes
            options[options.index("--labels") + 1] = "50%"
        return [name, encoder, generate_images(data), *options, "--epochs", "1", "--device", "cpu"]
    if name in _PLACE_OF_IMAGES:
        return [name, *_with_images(name, rest), "--device", "cpu"]
    if name == "evaluate":
        if "--data" in rest:
            rest[rest.index("--data") + 1] = generate_images(rest[rest.index("--data") + 1])
        return [name, *rest, "--max-images", "24", "--device", "cpu", "--epochs", "1"]
    if name in ("pack", "sweep"):
        data, *options = rest
        options = options if name == "pack" else [*_narrow(options), *_sets(*changes)]
        return [name, generate_images(data), *options]
    return words


_PLACE_OF_IMAGES = {"inspect": 0, "embed": 1, "predict": 1, "neighbors": 3}


def _with_images(name: str, words: list[str]) -> list[str]:
    """Create the images that a command reads, unless it reads a file of features."""
    place = _PLACE_OF_IMAGES[name]
    if name == "neighbors":
        noise(40, 50).save(words[1])
        assert words[2] == "--in"
    if not Path(words[place]).suffix:
        words[place] = generate_images(words[place])
    return words


def _without(options: list[str], changes: list[str]) -> list[str]:
    """Drop options that stand for a setting which this test changes."""
    names = {option_of(change.partition("=")[0]) for change in changes} - {""}
    drop = {i + more for i, word in enumerate(options) if word in names for more in (0, 1)}
    return [word for i, word in enumerate(options) if i not in drop]


def _sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def _narrow(options: list[str]) -> list[str]:
    """Keep one seed and one value of each setting; presets are tested with sweeps."""
    kept = list(options)
    for i, word in enumerate(options[:-1]):
        if word in ("--seeds", "--vary"):
            kept[i + 1] = options[i + 1].split(",")[0]
        if word == "--preset":
            kept[i : i + 2] = ["--vary", "views.crop_scale_min=0.5"]
    return [*kept, "--max-images", "24", "--tasks", "geometry"]


def run_command(words: list[str], changes: list[str]) -> None:
    words = words[2:] if words[:2] == ["uv", "run"] else words
    if words[0] == "torchrun":
        run_torchrun(words[1:], changes)
        return
    if words[0] == "pytest":  # CI runs these tests
        assert [path for path in words if (ROOT / path).exists()], shlex.join(words)
        return
    if words[0] == "curl":  # there is no network; the content is generated next
        return
    if words[0] == "tar":
        (folder,) = (w.partition("=")[2] for w in words if w.startswith("--one-top-level="))
        put_checkpoint(Path(folder))
        return
    assert words[0] == "compressive", f"this test cannot run {shlex.join(words)!r}"
    if words[1] == "doctor":  # doctor/test_doctor.py runs these in processes
        assert words[2:] in ([], ["--json"]), shlex.join(words)
        return
    ours = small(words[1:], changes)
    if ours[0] == "sweep":
        planned(words[2:])  # as written, with all values and the preset
        run_as_sweep(ours[1:])
    invoke(ours)


def invoke(words: list[str]) -> str:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, f"{shlex.join(words)}: {found.output}{found.exception!r}"
    assert found.stdout
    return found.stdout


def planned(words: list[str]) -> tuple[dict[str, Any], list[PlannedRun]]:
    """Return a sweep's options and its runs."""
    given = PROGRAM.commands["sweep"].make_context("sweep", list(words)).params
    of = {name: given[name] for name in ("recipe", "vary", "preset", "seeds", "changes")}
    given["data"] = join_places(given["data"])
    return given, plan_runs(given["data"], **{name: value for name, value in of.items() if value})


def run_as_sweep(words: list[str]) -> None:
    """Do in this process what a sweep would start a process for; the sweep then skips it.

    A process takes eight seconds to import torch and timm. test_sweep.py tests that sweeps start
    processes.
    """
    given, (job,) = planned(words)
    data, changes, out = given["data"], list(given["changes"]), given["out"]
    run, tasks = (
        str(out / job.name),
        ["--tasks", given["tasks"], "--max-images", str(given["max_images"])],
    )
    sets = _sets(*changes, *job.changes)
    invoke(["pretrain", data, "--recipe", given["recipe"], *sets, "--out", run])
    invoke(["evaluate", run, *tasks])
    about = {name: given[name] for name in ("data", "recipe", "suite", "tasks", "max_images")}
    about |= {"set": changes, "varied": list(job.varied)}
    state = {"about": about, "runs": {job.name: "done"}}
    (out / "sweep.json").write_text(json.dumps(state))


def run_torchrun(words: list[str], changes: list[str]) -> None:
    """Run a torchrun command in two processes; train/test_pretrain.py tests torchrun itself."""
    known = get_args_parser().parse_args(words)
    assert (known.module, known.training_script) == (True, "compressive")
    meeting = Path.cwd() / "meeting"
    ours = small(known.training_script_args, changes)
    together(worker, (str(Path.cwd()), f"file://{meeting}", ours), 2)
    meeting.unlink(missing_ok=True)


def worker(rank: int, folder: str, meeting: str, words: list[str]) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, f"{found.output}{found.exception!r}"


def run_python(source: str, name: str) -> None:
    for path in map(Path, re.findall(r'"([\w./-]+\.(?:jpg|png))"', source)):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            noise(40, 50).save(path)
    exec(compile(source, name, "exec"), {"__name__": "__document__"})


# --- the tests ----------------------------------------------------------------------------------

RUN = [d for d in DOCUMENTS if any(b.language in ("bash", "python") for b in fenced(d.read_text()))]


@pytest.mark.slow
@pytest.mark.parametrize("document", RUN, ids=name_of)
def test_commands_and_snippets_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    # Two instead of five to eight learning rates; finetuning/test_finetune.py tests the search.
    monkeypatch.setattr("compressive.finetuning.run.SMALL_SET_RATES", (0.2, 0.1))
    monkeypatch.setattr("compressive.finetuning.search._MOST_BEYOND", 0)
    blocks = fenced(document.read_text())
    is_resnet = any(language == "python" and "resnet18" in text for language, text in blocks)
    changes = RESNET if is_resnet else SMALL
    for language, text in blocks:
        if language == "python":
            run_python(text, document.name)
        elif language == "bash":
            for words in lines(text):
                run_command(words, changes)


@pytest.mark.parametrize("document", GUIDES, ids=name_of)
def test_every_code_block_is_run_or_marked_as_text(document: Path) -> None:
    """`text` is for output of commands and for drawings."""
    allowed = {"python", "bash", *NOT_RUN, *(["sh"] if document.name == "README.md" else [])}
    for language, text in fenced(document.read_text()):
        begin = text.strip().splitlines()[0]
        assert language in allowed, f"mark as ```bash, ```python or ```text: {begin!r}"
        if language in NOT_RUN:
            hidden = re.search(r"^ *(\$ |uv run |compressive |torchrun |import )", text, re.M)
            assert hidden is None, f"mark as bash or python: {begin!r}"


def test_fenced_blocks_are_found() -> None:
    text = "a\n```\nx\n```\n- b\n  ```bash\n  y \\\n    z # w\n  ```\n"
    assert fenced(text) == [("", "x\n"), ("bash", "  y \\\n    z # w\n")]
    assert lines(fenced(text)[1].text) == [["y", "z"]]


def inline(text: str) -> list[str]:
    """Return our commands in running text."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [s for s in spans if s.startswith(("compressive ", "--"))]


@pytest.mark.parametrize("document", GUIDES, ids=name_of)
def test_inline_commands_and_options_exist(document: Path) -> None:
    of = {
        n: {o for p in c.params for o in (*p.opts, *p.secondary_opts)}
        for n, c in PROGRAM.commands.items()
    }
    every = set.union(*of.values())
    for span in inline(document.read_text()):
        words = shlex.split(span.replace("[", " ").replace("]", " "))
        is_whole = words[0] == "compressive" and words[1] != "--help"
        assert not is_whole or words[1] in of, span
        known = (of[words[1]] if is_whole else every) | {"--help"}
        assert {w for w in words if w.startswith("--")} <= known, span
        changes = [
            value for name, value in pairwise(words) if name == "--set" and value != "NAME=VALUE"
        ]
        override(Config(method="c-byol"), *changes)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_are_not_broken(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize(
    ("index", "folders"),
    [("README.md", [".", "tutorials"]), ("results/README.md", ["results"])],
)
def test_index_links_to_every_page(index: str, folders: list[str]) -> None:
    page = DOCS / index
    linked = re.findall(r"\]\((\w[\w./-]*)\)", page.read_text())
    found = {(page.parent / target).resolve() for target in linked}
    pages = [p for f in folders for p in (DOCS / f).iterdir() if p.suffix in (".md", ".ipynb")]
    assert {p.resolve() for p in pages} - {page} <= found
