"""A checkpoint of another run or method is never resumed and never causes a traceback."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import together
from safetensors import safe_open
from tiny import differences, last, silent, tiny, words
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import Config
from compressive.evaluation.frozen_model import open_model
from compressive.methods import Method, build
from compressive.rundir import checkpoint
from compressive.rundir.files import CONFIG, ENCODER
from compressive.rundir.folder import read_run_id
from compressive.train.loop import pretrain

FOUR = "train.steps=4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two finished runs whose tensors have equal shapes."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1)):
        pretrain(tiny("method=simclr", FOUR, f"seed={seed}"), folder / name, display=silent())
    return folder / "a", folder / "b"


def steps(run: Path) -> list[Path]:
    return checkpoint.steps(run / "checkpoints")


def rewrite(path: Path, **changes: Any) -> None:
    """Rewrite a checkpoint with other entries."""
    checkpoint.save(path, checkpoint.load(path) | changes)


def test_checkpoint_from_another_run_with_equal_shapes_is_skipped(
    runs: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, expected = shutil.copytree(runs[0], tmp_path / "a"), last(runs[0])
    shutil.copy(steps(runs[1])[-1], steps(out)[-1])
    with caplog.at_level(logging.WARNING):
        pretrain(tiny("method=simclr", FOUR), out, display=silent())
    assert caplog.messages[0].startswith(f"skipped: {steps(out)[-1]} is of another run; ")
    assert differences(last(out), expected) == [], "training did not resume from its own checkpoint"


def test_run_with_only_foreign_checkpoints_gives_a_one_line_error(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(runs[0], tmp_path / "a")
    for own, foreign in zip(steps(out), steps(runs[1]), strict=True):
        shutil.copy(foreign, own)
    config = tiny("method=simclr", FOUR)
    arguments = ["pretrain", config.data.source, "--out", str(out), *words(config)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "checkpoints are damaged or of other runs; choose another --out" in " ".join(
        result.output.replace(f"in {out / 'checkpoints'} ", "").split()
    )


def test_run_id_is_random_and_the_same_in_all_files_of_a_run(runs: tuple[Path, Path]) -> None:
    ids = []
    for run in runs:
        ids.append(json.loads((run / CONFIG).read_text())["about"]["run_id"])
        assert read_run_id(run) == ids[-1]
        assert {checkpoint.load(path)["run_id"] for path in steps(run)} == {ids[-1]}
        with safe_open(run / ENCODER, "pt") as file:
            assert file.metadata()["run_id"] == ids[-1]
    assert ids[0] != ids[1]


def test_run_without_an_id_is_resumed(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = shutil.copytree(runs[0], tmp_path / "a")
    config = json.loads((out / CONFIG).read_text())
    del config["about"]["run_id"]
    (out / CONFIG).write_text(json.dumps(config))
    steps(out)[-1].unlink()
    state = checkpoint.load(steps(out)[-1])
    assert state.pop("run_id")
    checkpoint.save(steps(out)[-1], state)
    pretrain(tiny("method=simclr", FOUR), out, display=silent())
    found = checkpoint.load(steps(out)[-1])
    assert found.pop("run_id") == ""
    assert differences(found, last(runs[0])) == []


@pytest.mark.parametrize("damage", ["shape", "missing", "method", "custom", "optimizer"])
def test_mismatched_checkpoint_gives_a_one_line_error_and_exit_code_2(
    damage: str, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(runs[0], tmp_path / "a")
    path = steps(out)[-1]
    learner = checkpoint.load(path)["learner"]
    if damage == "method":
        other = tmp_path / "byol"
        pretrain(tiny("method=byol", "train.steps=1"), other, display=silent())
        learner = last(other)["learner"]
    name = next(name for name in learner if name.endswith("weight"))
    changes: dict[str, dict[str, Any]] = {
        "shape": {"learner": {**learner, name: torch.zeros(3)}},
        "missing": {"learner": {k: v for k, v in learner.items() if k != name}},
        "method": {"learner": learner},
        "custom": {"custom_method": True},
        "optimizer": {"optimizer": {"state": {}, "param_groups": []}},
    }
    rewrite(path, **changes[damage])
    config = tiny("method=simclr", FOUR)
    arguments = ["pretrain", config.data.source, "--out", str(out), *words(config)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {path} ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_files", torch.arange(9, dtype=torch.uint8)),  # not compressed data
        pytest.param("image_files", torch.zeros(0, dtype=torch.uint8), marks=pytest.mark.slow),
        pytest.param("image_files", "a.png", marks=pytest.mark.slow),
        pytest.param("images", None, marks=pytest.mark.slow),
        pytest.param("color_fingerprint", torch.zeros(3, 3), marks=pytest.mark.slow),
        pytest.param("color_fingerprint", 7, marks=pytest.mark.slow),
    ],
)
def test_forged_image_list_gives_a_one_line_error(
    name: str, value: Any, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """A list that is not compressed data once caused a traceback of zlib."""
    out = shutil.copytree(runs[0], tmp_path / "a")
    path = steps(out)[-1]
    rewrite(path, **{name: value})
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        pretrain(tiny("method=simclr", FOUR), out, display=silent())
    one_before = f"{path} does not fit this run (", "; delete it to resume from the one before"
    is_other = str(caught.value).startswith(f"{out} holds a run on ")
    assert is_other or all(part in str(caught.value) for part in one_before)
    if name == "image_files":  # also if the settings differ, which is detected earlier
        with pytest.raises(ValueError, match="does not fit this run"):
            pretrain(tiny("method=simclr", "train.steps=5"), out, display=silent())


def test_run_of_a_custom_method_is_not_resumed_with_a_packaged_method(tmp_path: Path) -> None:
    """Shapes may agree although the losses differ."""

    def custom(config: Config) -> Method:
        return build(config)

    pretrain(tiny(FOUR), tmp_path, display=silent(), method=custom)
    with pytest.raises(ValueError, match="was trained with a method from Python code; resume"):
        pretrain(tiny(FOUR), tmp_path, display=silent())


def test_evaluation_with_a_mismatched_checkpoint_skips_head_tasks(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    out, cpu = shutil.copytree(runs[0], tmp_path / "a"), torch.device("cpu")
    rewrite(steps(out)[-1], learner={"method.x": torch.zeros(1)})
    model = open_model(str(out), cpu)
    assert model.method is None
    assert "weights of another method" in model.why_no_method
    for path in steps(out):
        rewrite(path, run_id="0" * 12)
    assert "of other runs" in open_model(str(out), cpu).why_no_method


def test_encoder_from_another_run_is_reported(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = shutil.copytree(runs[0], tmp_path / "a")
    shutil.copy(runs[1] / ENCODER, out)
    with pytest.raises(ValueError, match="is of another run than") as caught:
        open_model(str(out), torch.device("cpu"))
    assert str(out / ENCODER) in str(caught.value)
    assert open_model(str(out / ENCODER), torch.device("cpu")).feature_dim == 96


def train_in_two(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    config = tiny("method=simclr", FOUR)
    pretrain(config, folder / "whole", display=silent())
    dist.barrier()
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        steps(folder / "resumed")[-1].unlink()
    dist.barrier()
    pretrain(config, folder / "resumed", display=silent())
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_agree_on_the_id_and_resume_bitwise(tmp_path: Path) -> None:
    together(train_in_two, (tmp_path,), 2)
    assert read_run_id(tmp_path / "whole") == read_run_id(tmp_path / "resumed") != ""
    assert differences(last(tmp_path / "resumed"), last(tmp_path / "whole")) == []


def test_folder_link_and_foreign_file_as_newest_checkpoint_are_skipped(tmp_path: Path) -> None:
    """Each of them once made resuming fail although an older checkpoint was valid."""
    valid = tmp_path / "step_00000001.safetensors"
    checkpoint.save(valid, {"step": 1})
    (tmp_path / "step_00000002.safetensors").mkdir()
    (tmp_path / "step_00000003.safetensors").symlink_to("nowhere")
    (tmp_path / "step_00000004.safetensors").write_bytes(b"foreign")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == valid
