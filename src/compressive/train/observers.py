"""Everything that learns about a run: its files, experiment trackers and callbacks."""

from collections.abc import Sequence

from compressive.config import Config
from compressive.distributed import rank
from compressive.progress import Display
from compressive.rundir.metrics_log import MetricsLogger
from compressive.rundir.tracker import Status, TrackedRun
from compressive.tracking import TrackerGroup
from compressive.train.callbacks import Callback, Callbacks, LogFunction


class Observers:
    """Opened when a run starts or restarts, closed when it ends."""

    status: Status = "failed"  # until the training loop ends

    def __init__(
        self, config: Config, display: Display, callbacks: Sequence[Callback | LogFunction] = ()
    ) -> None:
        self.callbacks: Callbacks = Callbacks(callbacks)
        self._tensorboard = config.train.tensorboard
        self._trackers = TrackerGroup(config.train.track if rank() == 0 else "", display.say)
        self._logger: MetricsLogger | None = None
        self._is_tracked = False

    def open(self, run: TrackedRun, *, is_over: bool) -> MetricsLogger:
        """Return the logger of a run from its step on; the trackers start with the first one."""
        files = {"step": run.step, "tensorboard": self._tensorboard}
        self._logger = MetricsLogger(run.folder, trackers=[self._trackers], **files)
        if not is_over and not self._is_tracked:
            self._trackers.start(run)
            self._is_tracked = True
        return self._logger

    def close(self) -> None:
        """Close the files, and end the run in all trackers."""
        try:
            if self._logger is not None:
                self._logger.close()
        finally:
            self._trackers.finish(self.status)
