"""The command line: what it prints, and one clear line with exit code 2 on bad input."""

import builtins
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tiny import last, photos, tiny, words
from typer.testing import CliRunner, Result

import compressive
from compressive import recipes
from compressive.cli import app as app_module
from compressive.cli import quickstart
from compressive.cli.app import _say_where, app
from compressive.cli.settings_reference import written
from compressive.cli.terminal import note, one_line_errors
from compressive.config import flat
from compressive.evaluation.results import Results
from compressive.rundir.folder import read_config
from compressive.train.loop import Outcome
from compressive.train.online_eval import Accuracy

RUN = CliRunner()

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(output: str) -> list[list[float]]:
    """The numbers of the table's rows that hold nothing but numbers."""
    lines = [re.findall(r"-?\d+\.\d+", line) for line in output.splitlines() if "│" in line]
    return [[float(x) for x in line] for line in lines if len(line) == 4]


def test_meter_reads_the_known_values() -> None:
    """Residual at agreement 1 and 0.5, n = 256, kappa 1024 and 10: mpmath, to the printed digit."""
    result = RUN.invoke(app, ["meter", "--batch", "256"])
    assert result.exit_code == 0
    table = {row[0]: row[1:] for row in rows(result.output)}
    assert table[1.0][:2] == [184.68, 0.0]
    assert table[0.5][0] == 189.10
    assert table[0.5][1] == pytest.approx(189.0999 - 184.6841, abs=0.006)
    assert f"log K = {6.24:.2f}" in result.output  # log 511
    predictive = [row[2] for row in table.values()]
    assert predictive == sorted(predictive)
    assert predictive[-1] < 6.24


def test_meter_repeats_by_seed() -> None:
    first, again, other = (
        RUN.invoke(app, ["meter", "--dim", "16", "--seed", seed]).output for seed in "001"
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kappa-e", "-3"], "kappa_e must be a finite number of 0 or more, got -3.0"),
        (["--kappa-b", "nan"], "kappa_b must be a finite number of 0 or more, got nan"),
        (["--dim", "1"], "--dim must be 2 or more and --batch 1 or more, got 1 and 512"),
        (["--batch", "0"], "--dim must be 2 or more and --batch 1 or more, got 256 and 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = RUN.invoke(app, ["meter", *arguments])
    assert result.exit_code == 2
    assert result.output.strip() == f"error: {message}"


@pytest.mark.parametrize(
    ("ask", "size"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), "1125899906842624 bytes"),
        (lambda: np.empty(2**50), "8.00 PiB"),
        (lambda: exhausted(), "20.00 GiB"),
    ],
)
def test_too_little_memory_is_one_line(
    ask: Callable[[], object], size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        ask()
    assert caught.value.exit_code == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: not enough memory for {size} more; ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_that_ends_without_a_number_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise error
    text = capsys.readouterr().err
    assert text.startswith("error: not enough memory; pretrain needs less with ")
    assert text.count("\n") == 1


def exhausted() -> None:
    """As torch says it of a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a ...")


def test_an_error_of_our_own_keeps_its_trace() -> None:
    with pytest.raises(RuntimeError, match="a fault"), one_line_errors():
        raise RuntimeError("a fault")


def test_help_names_every_command() -> None:
    result = RUN.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("quickstart", "pretrain", "recipes", "meter"):
        assert command in result.output


# recipes


def test_names_of_recipes_are_whole_in_a_narrow_terminal() -> None:
    output = RUN.invoke(app, ["recipes"], env={"COLUMNS": "80"}).stdout
    assert all(f" {name} " in output for name in recipes.names())


def test_recipes_lists_every_one() -> None:
    result = RUN.invoke(app, ["recipes"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines() if line.strip()]
    assert [line[0] for line in lines[2:] if "/" in line[0]] == recipes.names()


def test_a_recipe_is_shown_with_every_value_and_where_it_is_from() -> None:
    name = "c-byol/imagenet-r50-300"
    result = RUN.invoke(app, ["recipes", name], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    recipe = recipes.get(name)
    assert recipe.expected in result.output
    assert recipe.hardware in result.output
    rows = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    for setting, value in flat(recipe.config).items():
        assert rows[setting].split()[1] == written(value) or value == ""
        assert recipe.origins[setting][:40] in rows[setting]
    assert all(change in result.output for v in recipe.variants for change in v.changes)


# pretrain


def pretrain(*arguments: object) -> Result:
    return RUN.invoke(app, ["pretrain", *map(str, arguments)])


def complaint(result: Result, code: int = 2) -> str:
    """The one line of an error."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_a_folder_of_photos_is_all_that_is_needed(tmp_path: Path) -> None:
    """Settings are made from the images; the encoder that is named can be loaded and used."""
    images, out = photos(tmp_path / "photos", 7), tmp_path / "run"
    result = pretrain(images, "--steps", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert f"encoder: {out / 'encoder.safetensors'}" in result.stdout
    assert f'in Python: compressive.load("{out}")' in result.stdout
    assert "labels held out" not in result.stdout
    config = read_config(out)
    chosen = recipes.auto_recipe(7, 24).config
    assert (config.recipe, config.train.batch_size) == ("folder", chosen.train.batch_size)
    assert (config.data.source, config.train.steps) == (str(images), 2)
    encoder = compressive.load(out)
    feats = encoder(encoder.preprocess(sorted(images.iterdir())))
    assert feats.shape == (7, encoder.feature_dim)
    again = pretrain(images, "--steps", 2, "--out", out)
    assert again.exit_code == 0  # the same command again is no error


def test_the_warm_up_of_a_folder_is_a_tenth_of_the_epochs_asked_for(
    tmp_path: Path,
) -> None:
    images, out = photos(tmp_path / "photos", 7), tmp_path / "run"
    result = pretrain(images, "--epochs", 20, "--steps", 1, "--out", out)
    assert result.exit_code == 0, result.output
    config = read_config(out)
    assert (config.train.epochs, config.optim.warmup_epochs) == (20, 2)


def test_options_are_short_for_settings(tmp_path: Path) -> None:
    config = tiny("method=simclr")
    given = ["--recipe", "simclr/quickstart", *words(config)]
    out = tmp_path / "run"
    short = ["--seed", 5, "--epochs", 3, "--steps", 1]
    # What is set by name comes last and wins, so the short ones are left out of it here.
    names = ("seed=", "train.epochs=", "train.steps=")
    pairs = list(zip(given[2::2], given[3::2], strict=True))
    kept = [word for pair in pairs if not pair[1].startswith(names) for word in pair]
    result = pretrain(config.data.source, *given[:2], *kept, *short, "--out", out)
    assert result.exit_code == 0, result.output
    found = read_config(out)
    assert (found.seed, found.train.epochs, found.train.steps) == (5, 3, 1)
    assert found.recipe == "simclr/quickstart"
    assert "labels held out: nearest neighbors" in result.stdout


def test_without_out_the_folder_is_named_after_recipe_data_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(Path("images") / "cats", 6)
    given = words(tiny("method=simclr", "train.steps=1", "data.source=images/cats"))
    result = pretrain("images/cats", "--recipe", "simclr/quickstart", *given)
    assert result.exit_code == 0, result.output
    assert last(Path("runs/simclr-quickstart-cats-seed0"))["step"] == 1


def small(tmp_path: Path, *changes: str) -> list[str]:
    """Arguments of a run of a second on six images."""
    config = tiny("method=simclr", f"data.source={photos(tmp_path / 'photos', 6)}", *changes)
    return [config.data.source, "--recipe", "simclr/quickstart", *words(config)]


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    given, out = small(tmp_path), tmp_path / "run"
    assert pretrain(*given, "--out", out).exit_code == 0
    other = complaint(pretrain(*given, "--set", "optim.lr=0.7", "--out", out))
    assert other.startswith(f"{out} holds a run with optim.lr = 0.2, not 0.7; ")
    anew = complaint(pretrain(*given, "--out", out, "--no-resume"))
    assert anew == f"{out} already holds a run; choose another --out, or delete it"
    foreign = complaint(pretrain(*given, "--out", tmp_path))
    assert foreign == f"{tmp_path} is not empty and holds no run; choose another --out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere"),
        (["empty"], r"no images in empty, split train: looked for .*\.jpg"),
        (["[nowhere]"], r"\[nowhere\]"),  # brackets are no markup
        (["builtin", "--recipe", "c-simclr/cifar"], r"no recipe 'c-simclr/cifar'; did you mean"),
        (["builtin", "--set", "optim.lr"], r"a change must be NAME=VALUE, .* got 'optim\.lr'$"),
        (["builtin", "--set", "optim.l=1"], r"no setting 'l' in Optim; did you mean lr\?"),
        (["builtin", "--set", "optim.lr=big"], r"optim\.lr must be a number, got 'big'$"),
        (["builtin", "--set", "train.device=gpu"], r"train\.device must be auto, cpu, cuda"),
        (
            ["builtin", "--set", "method=simclr", "--set", "train.grad_accum_steps=2"],
            "grad_accum_steps",
        ),
        (["builtin", "--steps", "-3"], r"train\.steps must be 0 or more, got -3$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_to_pretrain_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    if "--recipe" not in arguments and arguments[0] == "builtin":
        arguments = [*arguments, "--recipe", "c-simclr/quickstart"]  # else it is looked at first
    assert re.search(message, complaint(pretrain(*arguments)))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_images_none_of_which_can_be_read_are_one_line(tmp_path: Path) -> None:
    images = tmp_path / "photos"
    images.mkdir()
    for name in "abc":
        (images / f"{name}.jpg").write_bytes(b"no image")
    message = complaint(pretrain(images, "--out", tmp_path / "run"))
    assert message == "none of 3 images of photos can be read"
    given = ["--recipe", "simclr/quickstart", "--out", tmp_path / "run"]
    message = complaint(pretrain(images, *given))
    assert message.startswith(f"none of the 3 images of photos can be read; {images / 'a.jpg'}: ")
    assert not (tmp_path / "run").exists()


# A run on photographs whose network is not the point.
SMALL: list[str | int] = ["--steps", 1, "--set", "views.size=32"]
SMALL += ["--set", "network.name=test_resnet", "--set", "network.stem=imagenet"]


def test_home_is_found_where_a_shell_leaves_the_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 8)
    done = pretrain("~/photos", *SMALL, "--out=~/runs/a")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/a/config.json").is_file()
    assert not (tmp_path / "~").exists()


def test_settings_are_made_for_the_images_that_are_asked_for(tmp_path: Path) -> None:
    """Of a split, and a part of it: two steps an epoch."""
    photos(tmp_path / "photos/val", 40)
    photos(tmp_path / "photos/test", 4)
    for name, given, batch in [("a", [], 16), ("b", ["--set", "data.limit=8"], 4)]:
        words = [*SMALL, "--set", "data.split=val", *given, "--out", tmp_path / name]
        done = pretrain(tmp_path / "photos", *words)
        assert done.exit_code == 0, done.output
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["train"]["batch_size"] == batch


def test_a_warning_of_ours_is_a_note(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 8)
    (tmp_path / "photos/x.heic").write_bytes(b"a phone's")
    words = [*SMALL, "--out", tmp_path / "run"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = pretrain(tmp_path / "photos", *words)
    assert done.exit_code == 0, done.output
    found = re.findall(r"^note: pictures of .*/photos .*: .heic 1; .*$", done.output, re.MULTILINE)
    assert len(found) == 1


def test_warnings_of_others_stay_but_for_advice_to_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."
    )
    for text in (advice, "this network is deprecated"):
        note(text, UserWarning, "/site-packages/torch/x.py", 7)
    assert capsys.readouterr().err == (
        "/site-packages/torch/x.py:7: UserWarning: this network is deprecated\n"
    )


def test_a_single_image_is_one_line(tmp_path: Path) -> None:
    images = photos(tmp_path / "photos", 1)
    given = ["--recipe", "simclr/quickstart", "--out", tmp_path / "run"]
    assert "has 1 image; there must be 2 or more" in complaint(pretrain(images, *given))
    given = ["--out", tmp_path / "run"]
    assert "has 1 image; there must be 2 or more" in complaint(pretrain(images, *given))


def test_an_ill_run_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    given = small(tmp_path, "optim.lr=1e9", "train.steps=30", "health.max_restarts=1")
    message = complaint(pretrain(*given, "--out", tmp_path / "run"), code=1)
    assert message.startswith("stopped after 1 returns: nan: loss")
    assert last(tmp_path / "run")["step"] == 0


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    """SIGTERM while it trains: saved, said, exit code 130; the same command goes on."""
    given, out = [*small(tmp_path, "train.steps=400"), "--out", str(tmp_path / "run")], tmp_path

    def stop() -> None:
        deadline = time.monotonic() + 60
        while not (out / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    result = pretrain(*given)
    thread.join()
    assert result.exit_code == 130
    step = last(out / "run")["step"]
    assert 0 < step < 400
    words = f"stopped and saved at step {step:,} of 400 in {out / 'run'}; the same command goes on"
    assert words in result.stdout
    assert "encoder: " not in result.stdout


@pytest.mark.parametrize("change", ["data.source=elsewhere", "recipe=byol/quickstart"])
def test_images_and_recipe_are_not_settings(change: str, tmp_path: Path) -> None:
    """A run would have the name and the batch of one, and the images of another."""
    message = complaint(pretrain(*small(tmp_path), "--set", change, "--out", tmp_path / "run"))
    assert message == "give images as DATA and a recipe with --recipe, not as other settings"
    assert not (tmp_path / "run").exists()


def test_a_command_comes_to_its_end_when_nobody_listens() -> None:
    """Its exit code is that of what it did, as for `compressive settings | head`."""
    there, here = os.pipe()
    os.close(there)
    with os.fdopen(here, "w") as pipe:
        words = [sys.executable, "-m", "compressive", "settings"]
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("quickstart", "compressive.cli.quickstart"),
        ("pretrain builtin", "compressive.train.loop"),
        ("evaluate a", "compressive.evaluation.suite"),
        ("sweep builtin", "compressive.sweep.runner"),
    ],
)
def test_ctrl_c_while_things_are_imported_is_one_line(
    words: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = builtins.__import__

    def imported(name: str, *rest: Any) -> Any:
        if name == module:
            raise KeyboardInterrupt
        return true(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    result = RUN.invoke(app, words.split())
    assert result.exit_code == 130
    assert result.output.startswith("error: interrupted; what was saved before is kept")


def test_of_a_run_that_seemed_ill_it_is_told_what_was_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _say_where(Outcome(Path("a"), step=7, total=24, saved=4, accuracy=None))
    assert capsys.readouterr().out == (
        "stopped at step 7 of 24, where the run seemed ill: a is as it was at step 4; the same "
        "command goes on\n"
    )


def test_a_run_is_watched_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny()
    begun = RUN.invoke(app, ["pretrain", config.data.source, "--out", str(run), *words(config)])
    assert begun.exit_code == 0, begun.output
    seen = RUN.invoke(app, ["watch", str(run), "--once"])
    assert seen.exit_code == 0, seen.output
    assert "c-simclr" in seen.output
    page = tmp_path / "page.html"
    written = RUN.invoke(app, ["report", str(run), "--out", str(page)])
    assert written.exit_code == 0, written.output
    assert str(page) in written.output.replace("\n", "")
    assert "c-simclr" in page.read_text()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["report", "nowhere"], "nowhere"),
        (["watch", "nowhere"], "nowhere"),
        (["sweep", "builtin", "--preset", "alpha"], "preset must be one of"),
        (["sweep", "builtin"], "nothing is varied; give --vary, --preset or several --seeds"),
        (["sweep", "builtin", "--vary", "bottleneck.gamma=1,2"], "gamma"),
    ],
)
def test_what_looks_at_runs_complains_in_one_line(given: list[str], complaint: str) -> None:
    result = RUN.invoke(app, given)
    assert result.exit_code == 2
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_the_version_is_said() -> None:
    result = RUN.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == version("compressive")


FIGURES = {
    ("logistic", "top-1"): 0.71, ("kNN 20", "top-1"): 0.62, ("kNN 200", "top-1"): 0.11,
    ("few labels 1%", "top-1"): 0.12, ("few labels 10%", "top-1"): 0.53,
    ("information", "residual"): 180.0, ("information", "reducible_residual"): 1.25,
    ("information", "predictive"): 2.5, ("logistic", "top-5"): 0.99,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(config: Any, out: Path, **_: Any) -> Outcome:
        return Outcome(out, 5, 5, 5, None)

    def evaluate(*_: Any, **__: Any) -> tuple[Results, Path]:
        results = Results("a")
        for (task, metric), value in FIGURES.items():
            results.add(task, "set", metric, value, protocol={}, n=1)
        return results, Path()

    monkeypatch.setattr(quickstart, "pretrain", pretrain)
    monkeypatch.setattr(quickstart, "evaluate", evaluate)
    monkeypatch.setattr(quickstart, "_pixels", lambda: 0.095)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


def test_the_quick_starts_rows_have_the_figures_of_their_names(tmp_path: Path) -> None:
    pixels, *rows = quickstart.quickstart(tmp_path)
    assert pixels[:5] == ("raw pixels", 0.095, None, None, None)
    assert [row[:5] for row in rows] == [
        (name, 0.71, 0.62, 0.53, 1.25) for name in ("simclr", "c-simclr")
    ]


def test_the_quick_starts_table_has_them_in_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressive.report.page.write_report", lambda runs, out, **_: out)
    monkeypatch.setattr("compressive.evaluation.tables.verdicts", lambda runs: None)
    printed = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path)])
    assert printed.exit_code == 0, printed.output
    rows = [
        re.findall(r"[\w%.][\w%. -]*[\w%]", line)
        for line in printed.output.splitlines()
        if "│" in line or "┃" in line
    ]
    assert ["linear", "kNN", "10 % of labels", "reducible_residual"] in rows
    assert ["raw pixels", "9.5%"] in rows
    assert ["c-simclr", "71.0%", "62.0%", "53.0%", "1.25"] in rows


def test_neighbors_and_probe_are_said_under_their_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app_module._say_where(
        Outcome(tmp_path, 5, 5, 5, Accuracy(probe=0.25, neighbors=0.75, count=1200))
    )
    assert "nearest neighbors 75.0%, linear probe 25.0% of 1,200" in capsys.readouterr().out
