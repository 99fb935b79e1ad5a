"""The command line: its output, and one line with exit code 2 on bad input."""

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
from compressive.cli import info_commands
from compressive.cli.app import app
from compressive.cli.outcome import print_outcome
from compressive.cli.settings_reference import written
from compressive.cli.terminal import one_line_errors, print_warning
from compressive.config import flat
from compressive.rundir.folder import read_config
from compressive.train.online_eval import Accuracy
from compressive.train.outcome import Outcome

RUN = CliRunner()

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(output: str) -> list[list[float]]:
    """Return the numbers of the table rows that have four numbers."""
    lines = [re.findall(r"-?\d+\.\d+", line) for line in output.splitlines() if "│" in line]
    return [[float(x) for x in line] for line in lines if len(line) == 4]


def test_meter_prints_known_values() -> None:
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


def test_meter_is_reproducible_by_seed() -> None:
    first, again, other = (
        RUN.invoke(app, ["meter", "--dim", "16", "--seed", seed]).output for seed in "001"
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("--kappa-e", "-3", "-3.0"),
        ("--kappa-b", "nan", "nan"),
        ("--dim", "1", "1"),
        ("--batch", "0", "0"),
        ("--seed", "-1", "-1"),
    ],
)
def test_invalid_option_is_one_line_and_exit_code_2(option: str, value: str, shown: str) -> None:
    message = complaint(RUN.invoke(app, ["meter", option, value]))
    assert message.startswith(option)
    assert message.endswith(f" {shown}")


@pytest.mark.parametrize(
    ("ask", "size"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), "1125899906842624 bytes"),
        (lambda: np.empty(2**50), "8.00 PiB"),
        (lambda: exhausted(), "20.00 GiB"),
    ],
)
def test_out_of_memory_is_one_line_with_the_size(
    ask: Callable[[], object], size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        ask()
    assert caught.value.exit_code == 1
    text = capsys.readouterr().err
    assert f"memory for {size} more" in text
    assert "train.batch_size" in text
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
def test_out_of_memory_without_a_size_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise error
    text = capsys.readouterr().err
    assert "not enough memory;" in text
    assert "train.batch_size" in text
    assert text.count("\n") == 1


def exhausted() -> None:
    """Raise torch's out-of-memory error of a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a ...")


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault"), one_line_errors():
        raise RuntimeError("a fault")


def test_help_lists_every_command() -> None:
    result = RUN.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("quickstart", "pretrain", "recipes", "meter"):
        assert command in result.output


# recipes


@pytest.mark.parametrize("has_gpu", [False, True])
def test_recipes_are_one_line_each_with_those_for_this_machine_first(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info_commands, "_has_gpu", lambda: has_gpu)
    lines = RUN.invoke(app, ["recipes"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 45
    listed = [line.split()[0] for line in lines if "/" in line.split()[0]]
    assert sorted(listed) == sorted(recipes.names())
    titles = [i for i, line in enumerate(lines) if line.endswith(":")]
    first = {line.split("/")[1].split()[0] for line in lines[titles[0] + 1 : titles[1]]}
    cifar = {"cifar10-r18-200", "cifar10-r18-500", "cifar10-r18-1000"}
    assert first == {"quickstart"} | (cifar if has_gpu else set())


def test_recipes_lists_those_with_a_prefix() -> None:
    lines = RUN.invoke(app, ["recipes", "c-byol"]).stdout.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("c-byol/")]
    assert sorted(listed) == sorted(n for n in recipes.names() if n.startswith("c-byol"))
    assert not [line for line in lines if line.startswith("simclr")]
    assert "c-byol?" in complaint(RUN.invoke(app, ["recipes", "c-byool"]))


def test_recipe_is_shown_with_all_values_and_origins() -> None:
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
    """Return the single line of an error message."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_pretrain_needs_only_a_folder_of_photos(tmp_path: Path) -> None:
    """Settings are chosen from the images; the named encoder can be loaded and used."""
    images, out = photos(tmp_path / "photos", 7), tmp_path / "run"
    result = pretrain(images, "--steps", 1, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert f"encoder: {out / 'encoder.safetensors'}" in result.stdout
    assert f'in Python: compressive.load("{out}")' in result.stdout
    assert "kNN" not in result.stdout
    config = read_config(out)
    chosen = recipes.auto_recipe(7, 24).config
    assert (config.recipe, config.train.batch_size) == ("folder", chosen.train.batch_size)
    assert (config.data.source, config.train.steps) == (str(images), 1)
    encoder = compressive.load(out)
    feats = encoder(encoder.preprocess(sorted(images.iterdir())))
    assert feats.shape == (7, encoder.feature_dim)
    again = pretrain(images, "--steps", 1, "--out", out)
    assert again.exit_code == 0


@pytest.mark.slow
def test_automatic_warmup_is_a_tenth_of_the_epochs(tmp_path: Path) -> None:
    images, out = photos(tmp_path / "photos", 7), tmp_path / "run"
    result = pretrain(images, "--epochs", 20, "--steps", 1, "--out", out)
    assert result.exit_code == 0, result.output
    config = read_config(out)
    assert (config.train.epochs, config.optim.warmup_epochs) == (20, 2)


@pytest.mark.slow
def test_options_are_shortcuts_for_settings(tmp_path: Path) -> None:
    config = tiny("method=simclr")
    given = ["--recipe", "simclr/quickstart", *words(config)]
    out = tmp_path / "run"
    short = ["--seed", 5, "--epochs", 3, "--steps", 1]
    # --set overrides the short options, so their settings are removed from it.
    names = ("seed=", "train.epochs=", "train.steps=")
    pairs = list(zip(given[2::2], given[3::2], strict=True))
    kept = [word for pair in pairs if not pair[1].startswith(names) for word in pair]
    result = pretrain(config.data.source, *given[:2], *kept, *short, "--out", out)
    assert result.exit_code == 0, result.output
    found = read_config(out)
    assert (found.seed, found.train.epochs, found.train.steps) == (5, 3, 1)
    assert found.recipe == "simclr/quickstart"
    assert re.search(r"kNN [\d.]+%, linear probe [\d.]+%", result.stdout)


@pytest.mark.slow
def test_default_folder_is_named_after_recipe_data_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(Path("images") / "cats", 6)
    given = words(tiny("method=simclr", "train.steps=1", "data.source=images/cats"))
    result = pretrain("images/cats", "--recipe", "simclr/quickstart", *given)
    assert result.exit_code == 0, result.output
    assert last(Path("runs/simclr-quickstart-cats-seed0"))["step"] == 1


def small(tmp_path: Path, *changes: str) -> list[str]:
    """Return arguments of a one-second run on six images."""
    config = tiny("method=simclr", f"data.source={photos(tmp_path / 'photos', 6)}", *changes)
    return [config.data.source, "--recipe", "simclr/quickstart", *words(config)]


@pytest.mark.slow
def test_folder_with_another_run_or_other_files_is_rejected(tmp_path: Path) -> None:
    given, out = small(tmp_path), tmp_path / "run"
    assert pretrain(*given, "--out", out).exit_code == 0
    other = complaint(pretrain(*given, "--set", "optim.lr=0.7", "--out", out))
    assert re.search(rf"{out} .*optim\.lr.* 0\.2.* 0\.7", other)
    for arguments, folder in (([out, "--no-resume"], out), ([tmp_path], tmp_path)):
        message = complaint(pretrain(*given, "--out", *arguments))
        assert str(folder) in message
        assert "--out" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere"),
        (["empty"], r"empty.* train.*\.jpg"),
        (["[nowhere]"], r"\[nowhere\]"),  # not interpreted as markup
        (["builtin", "--recipe", "c-simclr/cifar"], r"'c-simclr/cifar'.*c-simclr/cifar10"),
        (["builtin", "--set", "optim.lr"], r"NAME=VALUE.*'optim\.lr'"),
        (["builtin", "--set", "optim.l=1"], r"'optim\.l'.*optim\.lr\?"),
        (["builtin", "--set", "optim.lr=big"], r"^optim\.lr.*'big'"),
        (["builtin", "--set", "train.device=gpu"], r"^train\.device.*cpu, cuda.*'gpu'"),
        (
            ["builtin", "--set", "method=simclr", "--set", "train.grad_accum_steps=2"],
            r"^train\.grad_accum_steps.* 1 .*simclr.* 2",
        ),
        (["builtin", "--steps", "-3"], r"^train\.steps.* -3$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_pretrain_input_is_one_line_and_creates_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    if "--recipe" not in arguments and arguments[0] == "builtin":
        arguments = [*arguments, "--recipe", "c-simclr/quickstart"]
    assert re.search(message, complaint(pretrain(*arguments)))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_unreadable_images_are_one_line(tmp_path: Path) -> None:
    images = tmp_path / "photos"
    images.mkdir()
    for name in "abc":
        (images / f"{name}.jpg").write_bytes(b"no image")
    message = complaint(pretrain(images, "--out", tmp_path / "run"))
    assert re.search("3 images of photos", message)
    given = ["--recipe", "simclr/quickstart", "--out", tmp_path / "run"]
    message = complaint(pretrain(images, *given))
    assert re.search(f"3 images of photos.*{images / 'a.jpg'}: ", message)
    assert not (tmp_path / "run").exists()


# A short run with a small network.
SMALL: list[str | int] = ["--steps", 1, "--set", "views.size=32"]
SMALL += ["--set", "network.name=test_resnet", "--set", "network.stem=imagenet"]


def test_tilde_in_paths_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 8)
    done = pretrain("~/photos", *SMALL, "--out=~/runs/a")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/a/config.json").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_automatic_settings_depend_on_split_and_limit(tmp_path: Path) -> None:
    """The batch size gives at least two steps per epoch."""
    photos(tmp_path / "photos/val", 40)
    photos(tmp_path / "photos/test", 4)
    for name, given, batch in [("a", [], 16), ("b", ["--set", "data.limit=8"], 4)]:
        words = [*SMALL, "--set", "data.split=val", *given, "--out", tmp_path / name]
        done = pretrain(tmp_path / "photos", *words)
        assert done.exit_code == 0, done.output
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["train"]["batch_size"] == batch


def test_own_warnings_are_one_line_notes(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 8)
    (tmp_path / "photos/x.dng").write_bytes(b"a camera's")
    words = [*SMALL, "--out", tmp_path / "run"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = pretrain(tmp_path / "photos", *words)
    assert done.exit_code == 0, done.output
    found = re.findall(r"^note: .*/photos.*\.dng 1.*$", done.output, re.MULTILINE)
    assert len(found) == 1


def test_other_warnings_keep_pythons_format_and_tf32_advice_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."
    )
    for text in (advice, "this network is deprecated"):
        print_warning(text, UserWarning, "/site-packages/torch/x.py", 7)
    assert capsys.readouterr().err == (
        "/site-packages/torch/x.py:7: UserWarning: this network is deprecated\n"
    )


def test_single_image_is_one_line(tmp_path: Path) -> None:
    images = photos(tmp_path / "photos", 1)
    given = ["--recipe", "simclr/quickstart", "--out", tmp_path / "run"]
    assert re.search("photos.* 1 image.* 2 ", complaint(pretrain(images, *given)))
    given = ["--out", tmp_path / "run"]
    assert re.search("photos.* 1 image.* 2 ", complaint(pretrain(images, *given)))


def test_diverged_run_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    given = small(tmp_path, "optim.lr=1e9", "train.steps=30", "health.max_restarts=1")
    message = complaint(pretrain(*given, "--out", tmp_path / "run"), code=1)
    assert "nan: loss" in message
    assert last(tmp_path / "run")["step"] == 0


def test_stopped_run_prints_how_to_resume(tmp_path: Path) -> None:
    """SIGTERM during training saves a checkpoint, prints its step and exits with 130."""
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
    assert re.search(f"step {step:,} of 400 in {out / 'run'};.*resume", result.stdout)
    assert "encoder: " not in result.stdout


@pytest.mark.parametrize("change", ["data.source=elsewhere", "recipe=byol/quickstart"])
def test_data_source_and_recipe_cannot_be_set(change: str, tmp_path: Path) -> None:
    """The recorded source or recipe would not match the one that was used."""
    message = complaint(pretrain(*small(tmp_path), "--set", change, "--out", tmp_path / "run"))
    name, _, value = change.partition("=")
    assert re.search(f"{name}.*'{value}'.*DATA.*--recipe", message)
    assert not (tmp_path / "run").exists()


def test_closed_pipe_does_not_change_the_exit_code() -> None:
    """This happens in `compressive settings | head`."""
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
        ("pretrain builtin", "compressive.train.start"),
        ("evaluate a", "compressive.evaluation.many"),
        ("sweep builtin --seeds 0,1", "compressive.sweep.runner"),
    ],
)
def test_ctrl_c_during_imports_is_one_line(
    words: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = builtins.__import__

    def imported(name: str, *rest: Any) -> Any:
        if name == module:
            raise KeyboardInterrupt
        return true(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    result = RUN.invoke(app, words.split())
    assert "interrupted" in complaint(result, code=130)


def test_run_stopped_after_a_failure_names_its_last_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcome(Outcome(Path("a"), step=7, total=24, saved=4, accuracy=None))
    assert re.search("step 7 of 24.* a .*step 4;.*resume", capsys.readouterr().out)


@pytest.mark.slow
def test_watch_and_report_show_a_run(tmp_path: Path) -> None:
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
    ("line", "message"),
    [
        ("report nowhere", "nowhere"),
        ("watch nowhere", "nowhere"),
        ("sweep builtin --preset alpha", "'alpha'"),
        ("sweep builtin", "--vary"),
        ("sweep builtin --vary bottleneck.gamma=1,2", "'bottleneck.gamma'"),
    ],
)
def test_invalid_input_to_other_commands_is_one_line(line: str, message: str) -> None:
    assert message in complaint(RUN.invoke(app, line.split()))


def test_version_prints_the_version() -> None:
    result = RUN.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == version("compressive")


def test_final_accuracies_are_printed_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = Accuracy(probe=0.25, neighbors=0.75, count=1200)
    print_outcome(Outcome(tmp_path, 5, 5, 5, accuracy))
    assert "kNN 75.0%, linear probe 25.0% of 1,200" in capsys.readouterr().out
