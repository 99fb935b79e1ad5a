"""A damaged feature cache is computed again with a note and never changes a result."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import silent, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.evaluation.features import Features, cached
from compressive.train.loop import pretrain

KEY = {"weights": "a"}


def make() -> Features:
    return Features(torch.ones(2, 3), torch.arange(2), torch.arange(2))


@pytest.mark.parametrize("place", [-1, -30, -50])
def test_flipped_bit_in_feature_cache_is_computed_again(place: int, tmp_path: Path) -> None:
    """Flip bits in the feature vectors, the labels and the index."""
    cached(tmp_path, KEY, make)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 2
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match="computed again") as notes:
        found = cached(tmp_path, KEY, make)
    assert str(path) in str(notes[0].message)
    assert all(torch.equal(a, b) for a, b in zip(found, make(), strict=True))
    assert path.read_bytes() == whole


def test_feature_cache_of_another_key_or_without_checksum_is_computed_again(tmp_path: Path) -> None:
    cached(tmp_path, KEY, make)
    (path,) = tmp_path.iterdir()
    other = Features(torch.zeros(2, 3), torch.arange(2), torch.arange(2))
    cached(tmp_path / "b", {"weights": "b"}, lambda: other)
    (foreign,) = (tmp_path / "b").iterdir()
    for damage in (
        lambda: path.write_bytes(foreign.read_bytes()),
        lambda: save_file(load_file(path), path),
    ):
        damage()
        with pytest.warns(UserWarning, match="computed again"):
            assert torch.equal(cached(tmp_path, KEY, make).feats, torch.ones(2, 3))


def test_intact_feature_cache_is_used_without_a_note(tmp_path: Path) -> None:
    cached(tmp_path, KEY, make)

    def fail() -> Features:
        raise AssertionError("computed again")

    assert torch.equal(cached(tmp_path, KEY, fail).feats, torch.ones(2, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.*computed again")
def test_evaluation_with_a_damaged_cache_gives_the_same_results(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrain(tiny(), run, display=silent())
    words = ["evaluate", str(run), "--tasks", "knn,logistic", "--device", "cpu"]

    def numbers() -> dict[str, float]:
        records = json.loads((run / "evaluation" / "results.json").read_text())["records"]
        return {f"{r['task']} {r['metric']}": r["value"] for r in records}

    assert CliRunner().invoke(app, words).exit_code == 0
    before = numbers()
    paths = [p for p in run.rglob("*.safetensors") if len(p.stem) == 32]
    assert paths
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-2000::40] = bytes(b ^ 0x40 for b in content[-2000::40])
        path.write_bytes(content)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.output.count("computed again") == len(paths)
    assert numbers() == before
