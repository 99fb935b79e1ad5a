"""The process of a tracker: read the run and its values from standard input and log them."""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from compressive.rundir.tracker import Status, TrackedRun, Tracker

_CLASSES = {  # tracker -> module and class here
    "wandb": ("wandb_tracker", "WandbTracker"),
    "mlflow": ("mlflow_tracker", "MlflowTracker"),
    "trackio": ("trackio_tracker", "TrackioTracker"),
}


def main() -> None:
    """Serve one run; end when standard input ends, which also happens if training is killed."""
    # Trackers print to standard output. Keep it for messages, and send the rest to the log.
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # about the trackers' own dependencies

    def tell(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        _serve(make_tracker(sys.argv[1]), tell)
        tell(finished=True)
    except BaseException as error:  # also SystemExit
        lines = str(error).strip().splitlines() or [""]
        tell(error=f"{type(error).__name__}: {lines[0][:300]}".removesuffix(": "))
        raise


def make_tracker(name: str) -> Tracker:
    """Return the tracker of that name; imports its module here, but not yet its package."""
    module, inside = _CLASSES[name]
    return getattr(importlib.import_module(f"compressive.tracking.{module}"), inside)()


def _serve(tracker: Tracker, tell: Any) -> None:
    """Start a tracker, and log each line of standard input until it ends."""
    about = json.loads(sys.stdin.readline())
    run = TrackedRun(**{**about, "folder": Path(about["folder"])})
    if place := tracker.start(run):
        tell(place=place)
    status: Status = "failed"  # if training is killed
    for line in sys.stdin:
        message = json.loads(line)
        if "status" in message:
            status = message["status"]
        else:
            tracker.log(message["step"], message["values"])
    tracker.finish(status)


if __name__ == "__main__":
    main()
