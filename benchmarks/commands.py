"""Time commands that need no torch, from the start of Python to its end.

    python benchmarks/commands.py
    python benchmarks/commands.py --before ../old/src --rounds 20

Prints one JSON line with the median seconds of each command, and the median processor seconds,
which do not count the time that other programs use. Commands run in turn. `python -c pass` is a
lower bound. Bytecode of all modules exists, as on a user's machine after the first command.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
COMMANDS = ("--version", "--help", "pretrain --help", "recipes", "settings optim.lr", "typo")


def main() -> None:
    """Time all commands in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="src folder of another version")
    given = parser.parse_args()
    versions = {"now": SOURCE, **({"before": given.before} if given.before else {})}
    lines = {"python -c pass": (SOURCE, ["-c", "pass"])}
    for command in COMMANDS:
        for version, source in versions.items():
            name = f"{command}, {version}" if given.before else command
            lines[name] = source, ["-m", "compressive", *command.split()]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    for number in range(given.rounds + 1):
        for name, (source, words) in lines.items():
            found = timed(source, words)
            if number > 0:  # the first round writes bytecode
                seconds[name].append(found)
    from timing import environment

    print(
        json.dumps(
            {
                "benchmark": "commands",
                "seconds": {name: median(0, times) for name, times in seconds.items()},
                "processor seconds": {name: median(1, times) for name, times in seconds.items()},
                "rounds": given.rounds,
                **environment("cpu", "typer", "rich"),
            }
        )
    )


def timed(source: Path, words: list[str]) -> tuple[float, float]:
    """Run Python once; return its seconds and its processor seconds."""
    env = {**os.environ, "PYTHONPATH": str(source)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], env=env, capture_output=True)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return elapsed, used


def median(index: int, times: list[tuple[float, float]]) -> float:
    """Return the median of one of the two kinds of seconds."""
    return round(statistics.median(each[index] for each in times), 3)


if __name__ == "__main__":
    main()
