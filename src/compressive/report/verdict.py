"""The verdict of the report in one sentence."""

from collections import Counter
from collections.abc import Sequence

from compressive.metric_info import ONE_SEED
from compressive.rundir.records import ComparisonText

NOT_TESTED = "not tested"
TOO_FEW = "too few images to tell"
_TESTED = ("better", "worse", "higher", "lower", "networks differ", "undecided")


def verdict_sentence(names: Sequence[str], verdicts: ComparisonText | None) -> str:
    """Return the verdict on the evaluated experiments; text in backticks is code."""
    if not names:
        return f"The encoders are {NOT_TESTED} yet; `compressive evaluate RUN` tests one."
    if len(names) > 2:
        return (
            f"No verdict: this page has {len(names)} experiments, and a verdict compares two; "
            "`compressive compare A B` compares two of them."
        )
    if verdicts is None:
        return f"No verdict on {names[0]} and {names[1]}: they were not compared."
    count = Counter(verdict for _, verdict in verdicts.verdicts.values())
    tested = sum(count[verdict] for verdict in _TESTED)
    if not tested:
        why = TOO_FEW if count["too few images"] else "they were not measured in the same way"
        return f"No verdict on {names[0]} and {names[1]}: {why}."
    if verdicts.over != "seeds":
        differ = f"differ in {count['networks differ']} of {tested} metrics"
        return f"These two networks, {names[0]} and {names[1]}, {differ}; {ONE_SEED}."
    return _winner_sentence(names, count, tested)


def _winner_sentence(names: Sequence[str], count: Counter[str], tested: int) -> str:
    """Return which of two experiments is better in more metrics; single seeds have no winner."""
    first, second = names
    of = f"of {tested} metrics after correction for multiple comparisons"
    better, worse = count["better"], count["worse"]
    if not better and not worse:
        return f"No winner: neither {first} nor {second} is better in any {of}."
    if worse > better:
        first, second, better, worse = second, first, worse, better
    return f"{second} is better than {first} in {better} and worse in {worse or 'none'} {of}."
