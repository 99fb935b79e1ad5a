"""The packages themselves, in their offline modes, hold every value of a run and of its resumption.

wandb and trackio are in the dev group. MLflow is too large for it (630 MB): install it to run its
test.
"""

import importlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import Written, journal, silent, tiny

from compressive.config import flat
from compressive.rundir.folder import read_run_id
from compressive.train.loop import pretrain

pytestmark = pytest.mark.slow  # seconds each, to import the packages


def trained(out: Path, name: str) -> dict[int, float]:
    """Stop a run after three steps, resume it, and return its losses."""
    config = tiny("train.steps=6", f"train.track={name}")

    def stop(step: int, metrics: object) -> None:
        if step == 3:
            raise StopIteration

    with pytest.raises(StopIteration):
        pretrain(config, out, display=silent(), callbacks=[stop])
    display = Written()
    pretrain(config, out, display=display)
    assert not [text for text in display.said if "without it" in text], display.said
    losses = {line["step"]: line["loss"] for line in journal(out) if "loss" in line}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    return losses


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    out = tmp_path / "run"
    expected = trained(out, "wandb")
    parts = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(parts) == 2
    losses: dict[int, float] = {}
    for path in parts:
        records = list(wandb_records(path))
        (run,) = [each.run for each in records if each.HasField("run")]
        assert (run.run_id, run.project) == (read_run_id(out), "compressive")
        assert run.display_name == "run"
        settings = {each.key: json.loads(each.value_json) for each in run.config.update}
        assert settings.items() >= json.loads(json.dumps(flat(tiny("train.steps=6")))).items() - {
            ("train.track", "")
        }
        for each in records:
            if each.HasField("history"):
                items = {".".join(i.nested_key) or i.key: i.value_json for i in each.history.item}
                if "loss" in items:
                    losses[int(items["step"])] = float(items["loss"])
        (end,) = [each.exit for each in records if each.HasField("exit")]
        assert end.exit_code == 0
    assert losses == pytest.approx(expected)


def wandb_records(path: Path) -> Iterator[Any]:
    """Read the records of a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, at, block, parts = path.read_bytes(), 7, 32768, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for a header: padding
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield proto.Record.FromString(parts)
            parts = b""


def test_trackio_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    out = tmp_path / "run"
    expected = trained(out, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "compressive.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        ((settings,),) = base.execute("SELECT config FROM configs").fetchall()
    base.close()
    assert {name for name, _, _ in rows} == {f"run-{read_run_id(out)[:6]}"}
    values = [(step, json.loads(text)) for _, step, text in rows]
    assert {step: each["loss"] for step, each in values if "loss" in each} == expected
    assert json.loads(settings)["network.name"] == "test_resnet"


def test_mlflow_in_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    out = tmp_path / "run"
    expected = trained(out, "mlflow")
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        runs = base.execute("SELECT run_uuid, name, status FROM runs").fetchall()
        losses = base.execute("SELECT step, value FROM metrics WHERE key = 'loss'").fetchall()
        params = dict(base.execute("SELECT key, value FROM params").fetchall())
        experiments = [name for (name,) in base.execute("SELECT name FROM experiments")]
    base.close()
    assert [(name, status) for _, name, status in runs] == [("run", "FINISHED")]
    assert dict(losses) == expected
    settings = flat(tiny("train.steps=6", "train.track=mlflow"))
    assert params == {name: str(value) for name, value in settings.items()}
    assert "compressive" in experiments
