"""What a person types and reads: words for places, one line for an error or a warning."""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

_HOME = re.compile(r"(--[\w-]+=)?(~(?:/.*)?)", re.DOTALL)


class AtHome(TyperGroup):
    """Commands for which `~` is the home folder, also where a shell leaves it: in --out=~/x."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of a command line, with every such place in full."""
        return super().parse_args(ctx, [_at_home(word) for word in args])


def _at_home(word: str) -> str:
    found = _HOME.fullmatch(word)
    return f"{found[1] or ''}{os.path.expanduser(found[2])}" if found else word


def note(message: Warning | str, category: type[Warning], filename: str, *where: Any) -> None:
    """A warning of ours in a line for people, one of others as Python has it.

    Not torch's advice to round float32 products: those of the losses are meant to be exact.
    """
    if str(message).startswith("TensorFloat32 tensor cores"):
        return
    text = warnings.formatwarning(message, category, filename, *where[:1])
    is_ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    print(f"note: {message}" if is_ours else text.rstrip(), file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input is one line and exit code 2; what went wrong later is one line and 1."""
    try:
        yield
    except (ValueError, OSError) as error:
        print_error(str(error) if isinstance(error, ValueError) else _words(error))
        raise typer.Exit(2) from None
    except (RuntimeError, MemoryError) as error:
        from compressive.train.loop import TrainingFailed

        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else "")
        words = text if isinstance(error, TrainingFailed) else _too_much(text)
        if not words:
            raise
        print_error(words)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print_error("interrupted; what was saved before is kept, and the same command goes on")
        raise typer.Exit(130) from None


def _too_much(text: str) -> str:
    """What to do where memory ends, as torch says it of a GPU and of the host, and NumPy."""
    if not re.search(r"out of memory|to allocate|alloc_failed|bad_alloc", text, re.IGNORECASE):
        return ""
    asked = re.search(r"to allocate ([\d.]+ \w+)", text)
    return (
        f"not enough memory{f' for {asked[1]} more' if asked else ''}; pretrain needs less with a "
        "smaller train.batch_size or views.size, and on a GPU with "
        "train.activation_checkpointing=true or "
        "data.cache_on_device=no; evaluate with --max-images"
    )


def _words(error: OSError) -> str:
    return error.strerror or str(error) if error.filename is None else str(error)


def print_error(text: str) -> None:
    """One line for a person."""
    Console(stderr=True, soft_wrap=True).print("[bold red]error:[/]", escape(text), highlight=False)
