"""A run whose images another process decodes: same weights, same reports, bitwise resume."""

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from server_in_thread import use_threads, wait_until_ready
from tiny import differences, journal, last, silent, sorted_photos, tiny

from compressive.data import loaders
from compressive.data.decoder_process import DecoderProcess
from compressive.data.source import Source
from compressive.train import loop
from compressive.train.loop import pretrain
from compressive.train.run import Run


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_run_equals_one_that_decodes_in_threads_and_resumes_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(sorted_photos(), photos)
    (photos / "class1" / "0.png").write_bytes(b"damaged")
    config = tiny(f"data.source={photos}", "data.cache_on_device=no", "train.steps=6")
    pretrain(config, tmp_path / "threads", display=silent())
    servers = use_threads(monkeypatch).servers
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", "on")
    start = loaders.start_decoder_process

    def start_and_wait(source: Source, device: torch.device) -> DecoderProcess | None:
        process = start(source, device)
        return None if process is None else wait_until_ready(process)

    monkeypatch.setattr(loaders, "start_decoder_process", start_and_wait)
    pretrain(config, tmp_path / "whole", display=silent())
    assert servers[0].server.decoded > 4 * config.train.batch_size
    run = Run(config, tmp_path / "run", silent(), resume=True)
    run.restore()
    for _ in range(3):  # a stop request takes effect after a step
        loop.train(run, [signal.SIGTERM])
    assert loop.finish(run).step == 3
    run.close()
    pretrain(config, tmp_path / "run", display=silent())
    for server in servers:
        server.thread.join(10)
        assert not server.thread.is_alive()
    expected = last(tmp_path / "threads")
    for name in ("whole", "run"):
        assert differences(last(tmp_path / name), expected) == []
    assert journal(tmp_path / "whole") == journal(tmp_path / "threads")
    reports = [(tmp_path / name / "unreadable.txt").read_text() for name in ("threads", "whole")]
    assert reports[0] == reports[1]
    assert reports[0].count("\n") == 1
