"""Call functions and objects of the user during training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressive.distributed import rank
from compressive.train.outcome import Outcome


class Callback:
    """Called during training, in the first process only; override the methods you need.

    All values are Python numbers on the host. Methods must not use the device: the step would wait.
    """

    def on_log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Receive the line of metrics.jsonl of a log point; on a GPU, one log point later."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the accuracy of the linear probe and of kNN on held-out labels."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Receive the path of a checkpoint that was written."""

    def on_end(self, outcome: Outcome) -> None:
        """Receive the result of the run, at its end or if it was stopped."""


LogFunction = Callable[[int, Mapping[str, float | str]], Any]


class Callbacks:
    """Calls all callbacks; the first exception ends the calls, and stops training."""

    error: Exception | None = None  # raised by `on_end`, when everything is saved

    def __init__(self, callbacks: Sequence[Callback | LogFunction] = ()) -> None:
        for each in callbacks:
            if not callable(each) and not isinstance(each, Callback):
                rule = "callbacks must be functions or objects of compressive.Callback"
                raise ValueError(f"{rule}, got {type(each).__name__}")
        self._objects: list[Any] = [each for each in callbacks if isinstance(each, Callback)]
        self._functions: list[Any] = [each for each in callbacks if not isinstance(each, Callback)]
        if rank() > 0:
            self._objects, self._functions = [], []

    def on_log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Call objects, and functions with the same arguments."""
        self._call([*(each.on_log for each in self._objects), *self._functions], step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call objects."""
        self._call([each.on_evaluation for each in self._objects], step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Call objects."""
        self._call([each.on_checkpoint for each in self._objects], step, path)

    def on_end(self, outcome: Outcome) -> None:
        """Call objects, and raise the first exception of all calls."""
        self._call([each.on_end for each in self._objects], outcome)
        if self.error is not None:
            raise self.error

    def _call(self, functions: Sequence[Callable[..., Any]], *arguments: Any) -> None:
        for function in functions:
            if self.error is None:
                try:
                    function(*arguments)
                except Exception as error:
                    self.error = error
