"""Run `compressive` with steps of at least 0.1 s and uploads every 0.3 s, for tests that wait."""

import time
from typing import Any

from compressive.cli.app import app
from compressive.storage import mirror
from compressive.train import loop

if __name__ == "__main__":
    step = loop.train_step

    def paced(*given: Any) -> Any:
        time.sleep(0.1)
        return step(*given)

    loop.train_step = paced
    mirror._PUSH_EVERY = 0.3
    app()
