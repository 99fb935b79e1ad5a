"""Terminal input and output: paths, one-line errors, warnings and plain lines."""

import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from compressive.progress import printable
from compressive.rundir.files import local_path
from compressive.storage.address import is_remote, split_address

# Errors of NCCL and of gloo, which names itself in some of them only.
_PEER_ERRORS = (
    "gloo|nccl|ProcessGroup|DistStore|DistNetwork|by peer|pair closure|Timed out waiting|"
    "Pair is not connected|Socket closed|Broken pipe|Read error|writev"
)


def check_path(value: Any) -> Any:
    """Expand a leading `~`, which shells keep in `--out=~/runs`; reject URLs of other schemes."""
    if isinstance(value, list | tuple):
        return [check_path(each) for each in value]
    if not value or not isinstance(value, str | Path):
        return value
    with one_line_errors():
        if isinstance(value, str) and is_remote(value):
            split_address(value)
            return value
        path = local_path(value)
    return path if isinstance(value, Path) else str(path) if value.startswith("~") else value


path_argument: partial[Any] = partial(typer.Argument, callback=check_path)
path_option: partial[Any] = partial(typer.Option, callback=check_path)


def require_at_least(low: int, **options: float) -> None:
    """Raise ValueError if an option is below `low` or does not fit into 64 bits."""
    for name, value in options.items():
        if not low <= value < 2**63:
            bounds = f"{low} or more and below 2^63"
            raise ValueError(f"--{name.replace('_', '-')} must be {bounds}, got {value}")


def print_line(text: str, *, stderr: bool = False) -> None:
    """Print one line as it is: no wrapping, so that paths can be copied, and no markup."""
    Console(stderr=stderr, soft_wrap=True).print(printable(text), highlight=False, markup=False)


def print_next(*words: object) -> None:
    """Print the command that usually follows."""
    print_line(f"next: compressive {shlex.join(map(str, words))}")


class SafeTable:
    """A table, or anything that rich draws, without control characters in its texts."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.content, options):
            lines = text if control else "\n".join(map(printable, text.split("\n")))
            yield Segment(lines, style, control)


def print_error(text: str) -> None:
    """Print one line with a red "error:" to stderr."""
    Console(stderr=True, soft_wrap=True).print(
        "[bold red]error:[/]", escape(printable(text)), highlight=False
    )


def print_warning(
    message: Warning | str, category: type[Warning], filename: str, *where: Any
) -> None:
    """Print our warnings as one line; leave others in Python's format."""
    # Drop torch's advice to use TensorFloat32: the products in the losses must be exact. Drop PIL's
    # warning of large images: we report those above data.max_pixels ourselves.
    is_about_size = category.__name__ == "DecompressionBombWarning"
    if is_about_size or str(message).startswith("TensorFloat32 tensor cores"):
        return
    text = warnings.formatwarning(message, category, filename, *where[:1])
    is_ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    print(f"note: {printable(str(message))}" if is_ours else text.rstrip(), file=sys.stderr)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report errors in one line: exit code 2 for bad input, 1 for failures, 130 for Ctrl-C."""
    try:
        yield
    except ValueError as error:
        print_error(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        print_error((error.filename is None and error.strerror) or str(error))
        raise typer.Exit(2) from None
    except (RuntimeError, MemoryError) as error:
        from compressive.engine.local import WorkerLost
        from compressive.train.loop import TrainingFailed

        text = str(error) or ("out of memory" if isinstance(error, MemoryError) else "")
        own = text if isinstance(error, TrainingFailed | WorkerLost) else ""
        message = own or _memory_advice(text) or _peer_advice(text)
        if not message:
            raise
        print_error(message)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print_error("interrupted; saved work is kept, run the same command to resume")
        raise typer.Exit(130) from None


def _peer_advice(text: str) -> str:
    """Return what to do if the error of gloo or NCCL is a process that no longer answers."""
    if not re.search(_PEER_ERRORS, text, re.IGNORECASE):
        return ""
    from compressive.distributed import failed_ranks

    why = failed_ranks() or re.sub(r"\[[^]]*\] ?", "", text.split("\n")[0])[:200]
    hint = "its own output says why; run the same command to resume"
    return f"another process of this run ended or does not answer ({why}); {hint}"


def _memory_advice(text: str) -> str:
    """Return what to do if the error of torch or NumPy is a lack of memory, else ""."""
    if not re.search(r"out of memory|to allocate|alloc_failed|bad_alloc", text, re.IGNORECASE):
        return ""
    asked = re.search(r"to allocate ([\d.]+ \w+)", text)
    return (
        f"not enough memory{f' for {asked[1]} more' if asked else ''}; for pretrain, lower "
        "train.batch_size or views.size, or on a GPU set train.activation_checkpointing=true or "
        "data.cache_on_device=no; for evaluate, set --max-images"
    )
