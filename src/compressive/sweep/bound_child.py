"""Replace this process by a command that is killed when its parent ends.

Otherwise the training of a killed Ray process would continue and lock its folder, so that Ray could
not repeat it.
"""

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def run_bound(parent: int, words: list[str]) -> None:
    """Bind this process to its parent and execute the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            sys.exit(1)
    os.execvp(words[0], words)


if __name__ == "__main__":
    run_bound(int(sys.argv[1]), sys.argv[2:])
