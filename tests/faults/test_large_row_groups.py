"""Parquet row groups are read whole in bounded memory or refused with a one-line error."""

import io
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import noise

from compressive.data import shards
from compressive.data.sources import open_source

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # as in files of Hugging Face

# Read images with 250 MiB, then 600 MiB, more than the process already uses.
READ = """
import resource, sys
from pathlib import Path
from compressive.data.sources import open_source
status = Path("/proc/self/status").read_text().split()
used = 1024 * int(status[status.index("VmData:") + 1])
for more in (250, 600):
    resource.setrlimit(resource.RLIMIT_DATA, (used + more * 2**20, resource.RLIM_INFINITY))
    try:
        source = open_source(sys.argv[1])
        for i in range(0, len(source), 10):
            assert source.image(i).shape == (3, 600, 600)
        print("read all")
    except ValueError as error:
        print(error)
"""


def png(seed: int) -> bytes:
    file = io.BytesIO()
    noise(8, 8, seed=seed).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("nested", [True, False])
def test_row_group_is_unpacked_in_parts(
    nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [{"bytes": png(i), "path": ""} if nested else png(i) for i in range(7)]
    table = pa.table({"image": pa.array(cells, STRUCT if nested else pa.binary())})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=5)
    size = pq.read_metadata(tmp_path / "x.parquet").row_group(0).total_byte_size
    monkeypatch.setattr(shards, "_BATCH", size // 2)
    source = open_source(tmp_path / "x.parquet")
    for i in (6, 0, 4, 3, 1):
        expected = torch.from_numpy(np.array(noise(8, 8, seed=i))).permute(2, 0, 1)
        assert torch.equal(source.image(i), expected)


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_row_group_of_300_mb_is_read_or_refused_if_memory_is_short() -> None:
    """Its images were once reported as unreadable and skipped if memory was short."""
    pixels = np.random.default_rng(0).integers(0, 256, 600 * 600 * 3, dtype=np.uint8)
    cell = b"P6 600 600 255\n" + pixels.tobytes()
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.parquet")
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(pa.table({"image": [cell] * 300}), path, **options)
        assert pq.read_metadata(path).num_row_groups == 1
        whole = path.stat().st_size / 2**20
        assert whole > 300
        words = [sys.executable, "-c", READ, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [
            f"row group 0 of {path}, {whole:.0f} MiB, is read whole and does not fit into memory; "
            "write smaller row groups, or use image files or tar shards",
            "read all",
        ]


@pytest.mark.stress
def test_nested_row_group_of_more_than_2_gib_is_read(tmp_path: Path) -> None:
    """Arrow cannot unpack it at once; all of its images were once reported as unreadable."""
    large, path = bytes(800 * 2**20), tmp_path / "x.parquet"
    rows = [[{"bytes": png(i) + large, "path": ""}] for i in range(3)]
    column = pa.chunked_array([pa.array(row, STRUCT) for row in rows])
    pq.write_table(pa.table({"image": column}), path, use_dictionary=False, compression="zstd")
    about = pq.read_metadata(path)
    assert (about.num_row_groups, about.row_group(0).total_byte_size > 2**31) == (1, True)
    source = open_source(path)
    for i in (2, 0):
        assert source.image(i).shape == (3, 8, 8)
