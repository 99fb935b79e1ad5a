"""The cache of blocks is bounded, shared by processes, and never returns a wrong block."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compressive.storage.cache import BlockCache

BLOCK = 2**20
WRITER = """
import sys
from pathlib import Path
from compressive.storage.cache import BlockCache
cache = BlockCache(Path(sys.argv[1]), 32 * 2**20)
for i in range(int(sys.argv[3])):
    content = bytes([i % 256]) * 2**20
    found = cache.read(sys.argv[2], str(i), slice(5, 9), lambda: content)
    assert found == content[5:9]
    print(i, flush=True)
"""


def content(i: int) -> bytes:
    return i.to_bytes(4, "little") * (BLOCK // 4)


def used(folder: Path) -> int:
    """Add up the files independently of the cache."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def fill(cache: BlockCache, numbers: range) -> None:
    for i in numbers:
        cache.read("key", str(i), slice(0, 4), lambda i=i: content(i))


def never() -> bytes:
    raise AssertionError("the block must come from the cache")


def test_parts_of_blocks_come_from_the_disk(tmp_path: Path) -> None:
    fill(BlockCache(tmp_path, 2**26), range(4))
    other = BlockCache(tmp_path, 2**26)
    for _ in range(2):  # with and without the check of the first use
        assert other.read("key", "3", slice(4, 12), never) == content(3)[4:12]


def test_the_limit_holds_at_every_moment_and_the_oldest_blocks_leave_first(tmp_path: Path) -> None:
    cache, limit = BlockCache(tmp_path, 16 * 2**20), 16 * 2**20
    fill(cache, range(1))
    for i in range(1, 60):
        fill(cache, range(i, i + 1))
        assert cache.read("key", "0", slice(0, 4), never) == content(0)[:4]  # always in use
        assert used(tmp_path) <= limit
    assert cache.load("key", "0", slice(0, 4)) == content(0)[:4]
    assert cache.load("key", "59", slice(0, 4)) == content(59)[:4]
    assert cache.load("key", "1", slice(0, 4)) is None


@pytest.mark.slow
def test_processes_share_the_limit_and_one_that_is_killed_leaves_no_wrong_block(
    tmp_path: Path,
) -> None:
    limit, most = 32 * 2**20, 0
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen([*words, name, "150"], stdout=subprocess.PIPE) for name in ("a", "b", "a")
    ]
    killed = subprocess.Popen([*words, "a", "100000"], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    for _ in range(20):
        killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    while any(each.poll() is None for each in writers):
        most = max(most, used(tmp_path))
        time.sleep(0.01)
    assert [each.wait() for each in writers] == [0, 0, 0]
    killed.wait()
    for each in (*writers, killed):
        assert each.stdout is not None
        each.stdout.close()
    assert limit // 2 < most <= limit
    cache = BlockCache(tmp_path, limit)
    for i in range(150):
        for key in ("a", "b"):
            assert cache.load(key, str(i), slice(0, 1)) in (None, bytes([i % 256]))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_block_is_fetched_again(tmp_path: Path, damage: str) -> None:
    fill(BlockCache(tmp_path, 2**26), range(1))
    path = tmp_path / "key" / "0"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes({"cut": data[:1000], "flip": data, "empty": b""}[damage])
    cache, calls = BlockCache(tmp_path, 2**26), []
    for _ in range(2):
        found = cache.read("key", "0", slice(100, 104), lambda: calls.append(1) or content(0))
        assert found == content(0)[100:104]
    assert len(calls) == 1


def test_a_block_that_is_cut_while_it_is_in_use_is_fetched_again(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 2**26)
    fill(cache, range(2))
    fill(cache, range(2))
    os.truncate(tmp_path / "key" / "1", 50)
    assert cache.read("key", "1", slice(100, 104), lambda: content(1)) == content(1)[100:104]


def test_threads_fetch_a_block_once(tmp_path: Path) -> None:
    cache, calls = BlockCache(tmp_path, 2**26), []

    def fetch() -> bytes:
        calls.append(1)
        time.sleep(0.05)
        return content(7)

    threads = [
        threading.Thread(target=cache.read, args=("key", "7", slice(0, 4), fetch)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    left = tmp_path / "key" / ".5.1.1.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(BLOCK))
    os.utime(left, (1, 1))
    fill(BlockCache(tmp_path, 2**26), range(1))
    assert not left.exists()


def test_without_space_reading_continues_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a folder cannot be made below it
    cache = BlockCache(tmp_path / "file", 2**26)
    with pytest.warns(UserWarning, match="cannot cache"):
        found = cache.read("key", "0", slice(0, 4), lambda: content(3))
    assert found == content(3)[:4]
    assert cache.read("key", "0", slice(0, 4), lambda: content(4)) == content(4)[:4]
