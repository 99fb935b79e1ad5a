"""The verdict of the report in one sentence."""

from collections import Counter
from collections.abc import Mapping, Sequence

from compressive.metric_info import ONE_SEED
from compressive.rundir.records import ComparisonText

NOT_TESTED = "not tested"
TOO_FEW = "too few images to tell"
_TESTED = ("better", "worse", "higher", "lower", "networks differ", "undecided")


def verdict_sentence(
    names: Sequence[str], verdicts: ComparisonText | None, main: Mapping[str, str]
) -> str:
    """Return the verdict on the evaluated experiments; text in backticks is code.

    `main` has the verdicts on the main metrics, which the sentence names. The other metrics take
    part in the correction, but a count of all would mostly be one of changes of color.
    """
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
    if not any(count[verdict] for verdict in _TESTED):
        why = TOO_FEW if count["too few images"] else "they were not measured in the same way"
        return f"No verdict on {names[0]} and {names[1]}: {why}."
    by_verdict = {
        verdict: [m for m, each in main.items() if each == verdict] for verdict in _TESTED
    }
    if verdicts.over == "seeds":
        return _winner_sentence(names, by_verdict)
    differ = by_verdict["networks differ"]
    difference = f"differ in {_listed(differ)}" if differ else "differ in none of the main metrics"
    return f"These two networks, {names[0]} and {names[1]}, {difference}; {ONE_SEED}."


def _winner_sentence(names: Sequence[str], metrics: Mapping[str, Sequence[str]]) -> str:
    """Name the metrics in which one experiment is better; begin with the one that has more."""
    first, second = names
    better, worse = metrics["better"], metrics["worse"]
    if not better and not worse:
        said = f"No winner: neither {first} nor {second} is better in any main metric"
    else:
        if len(worse) > len(better):
            first, second, better, worse = second, first, worse, better
        said = f"{second} is better than {first} in {_listed(better)}"
        said += f", and worse in {_listed(worse)}" if worse else " and worse in no main metric"
    return f"{said}, after correction for multiple comparisons."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
