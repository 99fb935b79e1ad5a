"""Per-image values that were changed after their evaluation are never compared."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.evaluation.results import VALUES, Results, read


def evaluated(folder: Path, shift: int = 0) -> Path:
    """Write the results of an evaluation of 40 images; return the file of per-image values."""
    results = Results("runs/a")
    hits = (torch.arange(40) + shift) % 4 > 0
    results.add("linear", "set", "top-1", hits, protocol={}, images="x")
    results.add("linear", "set", "nll", hits.double() / 3, protocol={}, images="x")
    results.write(folder)
    return folder / VALUES


def test_flipped_bits_in_the_values_are_reported(tmp_path: Path) -> None:
    """Flip bits in the length, the header and the values; one once changed an interval silently."""
    path = evaluated(tmp_path)
    whole, intact = path.read_bytes(), read(tmp_path).values
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True, action="always") as notes:
            try:
                found = read(tmp_path).values
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
                continue
        is_same = all(np.array_equal(found[key], intact[key]) for key in intact)
        assert is_same or "has no checksum" in str(notes[0].message), at


def test_compare_refuses_damaged_values_in_one_line(tmp_path: Path) -> None:
    evaluated(tmp_path / "a")
    path = evaluated(tmp_path / "b", shift=1)
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert CliRunner().invoke(app, words).exit_code == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    expected = f"{path} is damaged (its checksum does not fit); delete it and run "
    assert result.stderr == f"error: {expected}`compressive evaluate` again\n"


def test_records_can_be_read_after_deleting_the_damaged_values(tmp_path: Path) -> None:
    """`evaluate` can then extend them."""
    evaluated(tmp_path).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)
    (tmp_path / VALUES).unlink()
    assert (len(read(tmp_path).records), read(tmp_path).values) == (2, {})


def test_values_without_checksum_are_used_with_a_note(tmp_path: Path) -> None:
    """Earlier versions wrote no checksum."""
    path = evaluated(tmp_path)
    values = load_file(path)
    save_file(values, path)
    with pytest.warns(UserWarning, match="has no checksum.*evaluate again to add one"):
        found = read(tmp_path)
    assert found.values.keys() == values.keys()
    found.write(tmp_path)
    assert read(tmp_path).values.keys() == values.keys()
