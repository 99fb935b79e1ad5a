"""The command that describes this machine for a bug report."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from compressive.cli.terminal import one_line_errors, print_line

_unfinished: list[str] = []  # names of checks that took too long and may still run


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions, devices, decoders and memory, and check each of them.

    A check takes at most five seconds. The output has no names of users, machines or folders, so
    that it can be pasted into a bug report. The exit code is 1 if a check fails.
    """
    with one_line_errors():
        from compressive.doctor.facts import collect, devices
        from compressive.doctor.self_tests import all_tests, run_test

        facts = collect()
        if not as_json:
            for line in fact_lines(facts):
                print_line(line)
        outcomes = []
        for test in all_tests(devices()):
            outcomes.append(run_test(test))
            if not as_json:
                print_line(outcome_line(outcomes[-1]._asdict()))
        if as_json:
            checks = [outcome._asdict() for outcome in outcomes]
            typer.echo(json.dumps({**facts, "checks": checks}, indent=1))
        failed = sum(outcome.state == "failed" for outcome in outcomes)
        if not as_json:
            passed = sum(outcome.state == "ok" for outcome in outcomes)
            print_line(f"{passed} of {len(outcomes)} checks passed, {failed} failed")
    _unfinished.extend(o.name for o in outcomes if o.reason.startswith("no result"))
    raise typer.Exit(1 if failed else 0)


def exit_at_once(code: int) -> None:
    """End this process if a check still runs; otherwise do nothing.

    The thread of a check that hangs, or of a slow compiler, would delay a normal exit. Only the
    program itself may call this, because other processes that run a command have more to do.
    """
    if _unfinished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts as lines of text."""
    lines = ["versions"]
    lines += _joined(f"{name} {version}" for name, version in facts["versions"].items())
    lines.append("devices")
    lines += [f"  {device_line(device)}" for device in facts["devices"]]
    lines.append("decoders")
    lines += [f"  {name}: {what}" for name, what in facts["decoders"].items()]
    free = ", ".join(f"{name} {_gigabytes(size)}" for name, size in facts["disk"].items())
    lines += ["disk", f"  free: {free}", "extras"]
    for extra, packages in facts["extras"].items():
        lines.append(f"  {extra}: " + ", ".join(f"{n} {v}" for n, v in packages.items()))
    return [*lines, "checks"]


def device_line(device: Mapping[str, Any]) -> str:
    """Describe a device in one line."""
    parts = [device["title"], device["capability"]]
    if device["total_memory"]:
        free, total = map(_gigabytes, (device["free_memory"], device["total_memory"]))
        parts.append(f"{free} of {total} free")
    if not device["has_float64"]:
        parts.append("no float64")
    return f"{device['name']}: " + ", ".join(filter(None, parts))


def outcome_line(outcome: Mapping[str, Any]) -> str:
    """Describe the outcome of a check in one line."""
    reason = f": {outcome['reason']}" if outcome["reason"] else ""
    return f"  {outcome['state']:<7} {outcome['name']}{reason} ({outcome['seconds']:.1f} s)"


def _joined(words: Any, width: int = 90) -> Sequence[str]:
    """Join words with commas into indented lines."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            lines.append(f"  {line},")
            line = ""
        line += f", {word}" if line else word
    return [*lines, f"  {line}"]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
