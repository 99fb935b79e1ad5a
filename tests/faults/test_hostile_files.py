"""Malicious files are handled: deep JSON, huge numbers, false headers, odd names."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
from safetensors.torch import load_file, save_file
from tiny import noise, photos, silent, tiny
from typer.testing import CliRunner

import compressive
from compressive import weights
from compressive.cli.app import app
from compressive.cli.terminal import print_error, print_line
from compressive.config import Config, override
from compressive.data.sources import open_source
from compressive.evaluation.results import read
from compressive.progress import Display, printable
from compressive.rundir.checksum import CHECKSUM_KEY, file_checksum
from compressive.rundir.folder import read_config
from compressive.rundir.reader import read_runs
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = '{"a":' * 100_000
HUGE = "9" * 400


def encoded() -> bytes:
    file = io.BytesIO()
    noise(8, 8).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, about: bytes) -> None:
    table = pa.table({"image": [encoded()] * 4, "label": [0, 1, 0, 1]})
    pq.write_table(table.replace_schema_metadata({b"huggingface": about}), path)


@pytest.mark.parametrize(
    "about",
    [
        DEEP.encode(),
        b"[]",
        b"no json",
        b"\xff\xfe",
        b'{"info": 3}',
        *(
            json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
            for names in (7, "ab", [1, 2], {"0": "a"}, [None, None])
        ),
    ],
)
def test_hostile_parquet_metadata_is_ignored(about: bytes, tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", about)
    source = open_source(tmp_path)
    assert source.classes == ("0", "1")
    assert source.image(3).shape == (3, 8, 8)


def test_valid_parquet_metadata_names_the_classes(tmp_path: Path) -> None:
    features = {"label": {"names": ["cup", "leopard"]}}
    about = json.dumps({"info": {"features": features}}).encode()
    write_parquet(tmp_path / "x.parquet", about)
    assert open_source(tmp_path).classes == ("cup", "leopard")


@pytest.mark.slow
def test_changed_parquet_footer_raises_no_other_error_than_valueerror_or_oserror(
    tmp_path: Path,
) -> None:
    write_parquet(tmp_path / "x.parquet", b"{}")
    content = (tmp_path / "x.parquet").read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for at in range(footer, len(content) - 8, 3):
        for value in (0x00, 0x7F, 0xFF):
            changed = bytearray(content)
            changed[at] = value
            (tmp_path / "x.parquet").write_bytes(changed)
            try:
                source = open_source(tmp_path / "x.parquet")
                for i in range(min(len(source), 8)):
                    source.image(i)
            except (ValueError, OSError):
                continue


@pytest.mark.slow
def test_deeply_nested_json_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_config(tmp_path)
    (tmp_path / "sweep.json").write_text(DEEP)
    words = ["sweep", "builtin", "--seeds", "0,1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "sweep.json is damaged" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", [f'{{"step": {HUGE}}}', DEEP, '{"step": 1e999}'])
def test_run_with_hostile_lines_in_its_metrics_resumes(line: str, tmp_path: Path) -> None:
    pretrain(tiny("train.steps=1"), tmp_path, display=silent())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    read_runs([tmp_path])
    outcome = pretrain(tiny("train.steps=1"), tmp_path, display=silent())
    assert outcome.step == 1
    assert line not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("name", ["train.steps", "views.size", "seed", "optim.lr"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_setting_of_400_digits_gives_a_short_error(name: str, sign: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .{{,60}}$"):
        override(Config(), f"{name}={sign}{HUGE}")


def test_record_of_400_digits_is_reported_as_invalid(tmp_path: Path) -> None:
    record: dict[str, Any] = dict.fromkeys(("run", "task", "dataset", "metric", "images"), "x")
    record |= {"of": "", "command": "", "low": None, "high": None, "n": 1, "protocol": {}}
    record |= {"seed": 0, "value": int(HUGE)}
    content = {"format_version": 2, "run": "x", "about": {}, "skipped": [], "skipped_in": {}}
    (tmp_path / "results.json").write_text(json.dumps({**content, "records": [record]}))
    with pytest.raises(ValueError, match="1 invalid records"):
        read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"size": "-5"},
        {"size": "0"},
        {"size": "900000000000"},
        {"size": HUGE},
        {"size": "x"},
        {"side": "-1"},
        {"network": DEEP},
        {"network": "[]"},
        {"width": 900_000_000_000},
        {"width": 1_000_000},
        {"width": -1},
        {"name": "resnet152"},
    ],
    ids=str,
)
def test_hostile_encoder_metadata_is_reported(change: dict[str, Any], tmp_path: Path) -> None:
    path = weights.find("cifar10-byol-r18")
    assert path is not None
    with safetensors.safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    if {"width", "name"} & change.keys():
        change = {"network": json.dumps(json.loads(metadata["network"]) | change)}
    tensors, metadata = load_file(path), metadata | change
    metadata[CHECKSUM_KEY] = file_checksum(metadata, tensors)
    save_file(tensors, tmp_path / "encoder.safetensors", metadata)
    with pytest.raises(ValueError, match=r"is damaged: its metadata|weights of another network"):
        compressive.load(tmp_path / "encoder.safetensors")


@pytest.mark.slow
def test_file_names_are_escaped_on_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = "x\x1b[2J\x1b]0;owned\x07\r\n\u202egpj." + os.fsdecode(b"\xff")
    for show in (print_line, print_error, Display().say):
        show(name)
    folder = photos(tmp_path / name, 2)
    (folder / "y\x1b[31m\nz.png").write_bytes(b"no image")
    for words in (["pretrain", f"{folder}/none"], ["watch", str(folder)]):
        assert CliRunner().invoke(app, words).exit_code == 2
    output = capsys.readouterr()
    words = ["embed", "cifar10-byol-r18", str(folder), "--out", str(tmp_path / "x.npz")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    text = output.out + output.err + result.output
    assert not set("\x1b\x07\r\u202e") & set(text)
    assert r"y\x1b[31m\nz.png: in no known image format" in result.output
    assert output.out.count("\n") == 2


def test_ordinary_names_are_printed_unchanged() -> None:
    for name in ("Bildschirmfoto 2026-11-17 um 9.30.jpg", "写真/犬 🐕\u200d🦺.png", "a[b]c"):
        assert printable(name) == name


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_permission_error_is_not_reported_as_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(b"")
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    code = f"import os, compressive.encoder; os.setuid(65534); compressive.load({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError: [Errno 13] Permission denied" in done.stderr
