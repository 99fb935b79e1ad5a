"""Ways in which the consumer of a loader stops."""

import gc
import signal
import threading
from typing import Any

import pytest

from compressive.data.loaders import Streaming

ENDINGS = ("close", "drop", "loader", "error", "interrupt")


def stop_consumer(ending: str, loader: Streaming, held: list[Any]) -> None:
    """Stop using the batches of a loader; `held` has the only reference to their generator."""
    if ending == "close":
        held[0].close()
    elif ending == "drop":
        held.clear()
        gc.collect()
    elif ending == "loader":
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(held[0])
    elif ending == "error":
        with pytest.raises(ZeroDivisionError), loader:
            raise ZeroDivisionError
    else:
        main = threading.get_ident()
        interrupt = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(held[0])
        interrupt.join()
