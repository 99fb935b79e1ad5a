"""The table of a comparison for the terminal, for Markdown, for notebooks and for the report."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from compressive.evaluation.compare import Difference, Experiment, compare, open_groups
from compressive.evaluation.results_table import SCALE, decimals, html_table, is_hidden
from compressive.metric_info import ONE_SEED, PERCENT
from compressive.rundir.files import RESULTS
from compressive.rundir.reader import results_of
from compressive.rundir.records import ComparisonText

_COLUMNS = ("figure", "A", "B", "B - A", "verdict")


def differences_table(
    first: Experiment, second: Experiment, found: Sequence[Difference], *, width: int = 80
) -> Table:
    """Return a table of two experiments with the metrics of `results_table`."""
    table = Table(
        title=f"A: {first.name}\nB: {second.name}",
        caption=f"{overall_verdict(found)}\n{_caption(found)}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in _COLUMNS:
        whole = name != "figure" and width >= 80  # narrower columns would lose digits
        justify = "right" if name in ("A", "B") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=whole)
    for line in _comparison_lines(found):
        table.add_row(*line)
    return table


def verdicts(runs: Sequence[Path], *, held_out: bool = False) -> ComparisonText | None:
    """Compare runs for a report; None if they are not two experiments with comparable results.

    Leave out single corruptions, which the report plots.
    """
    there = [results_of(run, held_out=held_out) for run in runs]
    there = [place for place in there if (place / RESULTS).is_file()]
    try:
        groups = open_groups([str(place) for place in there])
        found = compare(*groups) if len(groups) == 2 else []
    except (ValueError, OSError):  # the report itself lists what cannot be read
        return None
    shown = [each for each in found if _key_parts(each)[0] != "corruption"]
    if not shown:
        return None
    first, second = (group.name for group in groups)
    text = _comparison_lines(shown), _caption(found), overall_verdict(found)
    by_key = {each.key: (_format_difference(each)[2], each.verdict) for each in found}
    over = "seeds" if any(each.over == "seeds" for each in found) else "images"
    return ComparisonText(first, second, *text, by_key, over)


def differences_markdown(first: Experiment, second: Experiment, found: Sequence[Difference]) -> str:
    """Return the same table as Markdown, with the names of A and B below it."""
    rows = [_COLUMNS, ("---", "--:", "--:", "---", "---"), *_comparison_lines(found)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    said = f"{overall_verdict(found)}. {_caption(found)}"
    return f"{table}\n\nA: {first.name}. B: {second.name}. {said}."


def differences_html(first: Experiment, second: Experiment, found: Sequence[Difference]) -> str:
    """Return the same table as HTML, for notebooks."""
    caption = f"A: {first.name}. B: {second.name}. {overall_verdict(found)}. {_caption(found)}."
    return html_table(_COLUMNS, _comparison_lines(found), caption)


def overall_verdict(found: Sequence[Difference]) -> str:
    """Count better and worse metrics; for single runs, state that methods cannot be compared."""
    judged = [each for each in found if each.p is not None]
    if not judged:
        why = Counter(each.verdict for each in found).most_common(1)[0][0]
        return f"no metric can be compared ({why})"
    count, of = Counter(each.verdict for each in judged), f"of {len(judged)} metrics"
    if any(each.over == "seeds" for each in judged):
        return f"B is better in {count['better']} and worse in {count['worse']} {of}"
    return f"these two networks differ in {count['networks differ']} {of}; {ONE_SEED}"


def _caption(found: Sequence[Difference]) -> str:
    one = _common_dataset(_key_parts(each)[1] for each in found)
    over = " or ".join(sorted({each.over for each in found} - {""}))
    hidden = sum(is_hidden(*_key_parts(each)[::2]) for each in found)
    hidden = f", {hidden} of them not shown" if 0 < hidden < len(found) else ""
    adjusted = f"adjusted for {sum(each.p is not None for each in found)} comparisons{hidden}"
    sure = f"95 % intervals of single metrics over {over}; verdicts {adjusted} (Benjamini-Hochberg)"
    sure = sure if over else "no intervals"
    return f"on {one}; {SCALE}; {sure}" if one else f"{SCALE}; {sure}"


def _comparison_lines(found: Sequence[Difference]) -> list[tuple[str, ...]]:
    """Return metric, A, B, difference with its interval, and verdict, all as text."""
    shown = [e for e in found if not is_hidden(*_key_parts(e)[::2])] or list(found)
    names = _metric_labels([_key_parts(each) for each in shown])
    both = len({each.over for each in shown} - {""}) > 1
    lines = []
    for name, each in zip(names, shown, strict=True):
        verdict = each.verdict + (f" ({each.over})" if both and each.over else "")
        lines.append((name, *_format_difference(each), verdict))
    return lines


def _key_parts(each: Difference) -> tuple[str, str, str]:
    """Return task, dataset and metric."""
    task, _, rest = each.key.partition("/")
    dataset, _, metric = rest.rpartition("/")
    return task, dataset, metric


def _metric_labels(keys: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return labels without the dataset or the metric if there is only one."""
    one = _common_dataset(dataset for _, dataset, _ in keys)
    metrics = Counter((task, dataset) for task, dataset, _ in keys)
    names = []
    for task, dataset, metric in keys:
        part = dataset.removeprefix(one).removeprefix("-C").strip() if one else dataset
        several = metrics[task, dataset] > 1 or task == "information"  # which has many
        names.append(", ".join(filter(None, (task, part, metric if several else ""))))
    return names


def _common_dataset(datasets: Iterable[str]) -> str:
    """Return the dataset of all splits ("set test") and corruptions ("set-C fog"), or ""."""
    names = set(datasets)
    one = min(names, key=len)
    whole = all(name == one or name.startswith((f"{one} ", f"{one}-C")) for name in names)
    return one if whole else ""


def _format_difference(each: Difference) -> tuple[str, str, str]:
    """Return A, B and B - A: accuracies with one decimal as in the paper, others with three digits.

    Intervals of the others are rounded to one significant digit of their width.
    """
    scale, places = 100, 1
    if is_plain := _key_parts(each)[2] not in PERCENT:
        scale, places = 1, decimals(max(abs(each.first), abs(each.second)), 3)
    a, b = (f"{scale * value:z.{places}f}" for value in (each.first, each.second))
    if each.low is None or each.high is None:
        return a, b, f"{scale * each.difference:z.{places}f}"
    if is_plain:
        places = max(places, decimals((each.high - each.low) / 2, 1))
    ends = (f"{scale * end:z.{places}f}" for end in (each.low, each.high))
    return a, b, f"{scale * each.difference:z.{places}f} [{', '.join(ends)}]"
