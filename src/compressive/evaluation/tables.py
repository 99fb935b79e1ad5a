"""Results as a person reads them: a table for a run, one for a comparison, and for a report."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from compressive.evaluation.compare import Difference, Group, compare, open_groups
from compressive.evaluation.results import Record, Results
from compressive.metric_info import PERCENT
from compressive.report.tables import Verdicts
from compressive.rundir.files import RESULTS
from compressive.rundir.reader import results_of

_SCALE = "accuracies, ECE and Brier x 100"
_COLUMNS = ("figure", "A", "B", "B - A", "B is")


def results_table(results: Results) -> Table:
    """One line for a figure; what few look for is in the file alone."""
    table = Table(
        title=results.run,
        caption=f"{_SCALE}; 95 % intervals over test images",
    )
    for name in ("task", "data", "metric", "value", "interval"):
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    before = None
    for record in results.records:
        if _is_beside(record.task, record.metric):
            continue
        place = (record.task, record.dataset)
        figure, interval = _words(record)
        table.add_row(*(place if place != before else ("", "")), record.metric, figure, interval)
        before = place
    return table


def notes(results: Results) -> list[str]:
    """What was done to sets to have test images, as the records of this command say it."""
    now = [record for record in results.records if record.command == results.command]
    said = [note for record in now for note in record.protocol.get("notes", ())]
    return list(dict.fromkeys(said))


def differences_table(
    first: Group, second: Group, found: Sequence[Difference], *, width: int = 80
) -> Table:
    """Figures of two groups side by side, those that `results_table` has."""
    table = Table(
        title=f"A: {first.name}\nB: {second.name}",
        caption=_caption(found),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in _COLUMNS:
        whole = name != "figure" and width >= 80  # with less room they would lose digits
        justify = "right" if name in ("A", "B") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=whole)
    for line in _lines(found):
        table.add_row(*line)
    return table


def verdicts(runs: Sequence[Path], *, held_out: bool = False) -> Verdicts | None:
    """What a report says of runs that are two experiments, where both have results to compare.

    Without single corruptions, which it draws.
    """
    there = [results_of(run, held_out=held_out) for run in runs]
    there = [place for place in there if (place / RESULTS).is_file()]
    try:
        groups = open_groups([str(place) for place in there])
        found = compare(*groups) if len(groups) == 2 else []
    except (ValueError, OSError):  # a report shows what there is, and says what cannot be read
        return None
    found = [each for each in found if _parts(each)[0] != "corruption"]
    if not found:
        return None
    return Verdicts(groups[0].name, groups[1].name, _lines(found), _caption(found))


def differences_markdown(first: Group, second: Group, found: Sequence[Difference]) -> str:
    """The same table for a page: A and B are named below it."""
    rows = [_COLUMNS, ("---", "--:", "--:", "---", "---"), *_lines(found)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\nA: {first.name}. B: {second.name}. {_caption(found)}."


def _caption(found: Sequence[Difference]) -> str:
    one = _one_set(_parts(each)[1] for each in found)
    over = " or ".join(sorted({each.over for each in found} - {""}))
    sure = f"95 % intervals over {over}; each line is judged alone" if over else "no intervals"
    return f"on {one}; {_SCALE}; {sure}" if one else f"{_SCALE}; {sure}"


def _lines(found: Sequence[Difference]) -> list[tuple[str, ...]]:
    """Figure, A, B, their difference with its interval, verdict; all as text."""
    shown = [e for e in found if not _is_beside(*_parts(e)[::2])] or list(found)
    names = _figures([_parts(each) for each in shown])
    both = len({each.over for each in shown} - {""}) > 1
    return [
        (name, *_numbers(each), each.verdict + (f" ({each.over})" if both and each.over else ""))
        for name, each in zip(names, shown, strict=True)
    ]


def _parts(each: Difference) -> tuple[str, str, str]:
    """Task, dataset and metric."""
    task, _, rest = each.key.partition("/")
    dataset, _, metric = rest.rpartition("/")
    return task, dataset, metric


def _figures(keys: Sequence[tuple[str, str, str]]) -> list[str]:
    """What figures are of: without the dataset where it is one, or the metric where it is one."""
    one = _one_set(dataset for _, dataset, _ in keys)
    metrics = Counter((task, dataset) for task, dataset, _ in keys)
    names = []
    for task, dataset, metric in keys:
        part = dataset.removeprefix(one).removeprefix("-C").strip() if one else dataset
        several = metrics[task, dataset] > 1 or task == "information"  # which has many
        names.append(", ".join(filter(None, (task, part, metric if several else ""))))
    return names


def _one_set(datasets: Iterable[str]) -> str:
    """The set that all of these are of, itself, a part ("set test") or corrupted ("set-C fog")."""
    names = set(datasets)
    one = min(names, key=len)
    whole = all(name == one or name.startswith((f"{one} ", f"{one}-C")) for name in names)
    return one if whole else ""


def _numbers(each: Difference) -> tuple[str, str, str]:
    """A, B and B - A: accuracies with one digit as the paper has them, else three digits of A.

    An interval of anything else shows a digit of its width.
    """
    scale, places = 100, 1
    if is_plain := _parts(each)[2] not in PERCENT:
        scale, places = 1, _places(max(abs(each.first), abs(each.second)), 3)
    a, b = (f"{scale * value:z.{places}f}" for value in (each.first, each.second))
    if each.low is None or each.high is None:
        return a, b, f"{scale * each.difference:z.{places}f}"
    if is_plain:
        places = max(places, _places((each.high - each.low) / 2, 1))
    ends = (f"{scale * end:z.{places}f}" for end in (each.low, each.high))
    return a, b, f"{scale * each.difference:z.{places}f} [{', '.join(ends)}]"


def _places(size: float, digits: int) -> int:
    """How many places behind the point show so many digits of a number."""
    if not 0 < size < math.inf:
        return 0 if size == 0 else 2
    return min(6, max(0, digits - 1 - math.floor(math.log10(size))))


def _is_beside(task: str, metric: str) -> bool:
    """Whether a figure is in the file alone: few look for it."""
    if metric == "mean per class":
        return task != "transfer"  # there it is the paper's, for four of its sets
    return metric == "lipschitz_squared_kl" or task == "extra corruption"


def _words(record: Record) -> tuple[str, str]:
    interval = ""
    if record.low is not None and record.high is not None:
        low, high = (_figure(record.metric, end) for end in (record.low, record.high))
        interval = f"{low} to {high}"
    return _figure(record.metric, record.value), interval


def _figure(metric: str, value: float) -> str:
    """Times 100 with one digit as the paper has it, or three digits."""
    return f"{100 * value:.1f}" if metric in PERCENT else f"{value:#.3g}".removesuffix(".")
