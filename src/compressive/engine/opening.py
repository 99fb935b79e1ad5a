"""Open the engine that was chosen; Ray is imported only for its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from compressive.engine.choice import EngineChoice
from compressive.engine.local import Engine, LocalEngine


@contextmanager
def open_engine(choice: EngineChoice, device: str = "cpu") -> Iterator[Engine]:
    """Yield the chosen engine for units on a device; start or join its cluster, and leave it."""
    if choice.is_local:
        yield LocalEngine()
        return
    from compressive.engine.ray_cluster import open_ray

    with open_ray(choice, device) as engine:
        yield engine
