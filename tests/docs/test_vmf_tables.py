"""The tables of docs/results/2026-11-18-vmf.md match the result files."""

import json
from pathlib import Path

from result_tables import table_rows

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-18-vmf.md"
RATIOS = {
    "fixed / scipy": "fixed / scipy",
    "batched / fixed": "batched / fixed",
    "learned / fixed": "learned / fixed",
    "with backward": "learned, backward / fixed, backward",
    "with log_prob": "batched, log_prob / fixed, log_prob",
}


def results(*names: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return all dimensions; a size that is in several files is from the first."""
    texts = [(PAGE.with_suffix("") / f"{name}.json").read_text() for name in reversed(names)]
    return {size: row for text in texts for size, row in json.loads(text)["dimensions"].items()}


def size_of(row: dict[str, str]) -> str:
    n, count = row["n, rows"].split(", ")
    return f"n = {n}, {count.replace(',', '')}"


def test_samples() -> None:
    found = results("dimensions", "million")
    rows = table_rows(PAGE, "## Samples at kappa = n", "n, rows")
    assert {size_of(row) for row in rows} == set(found)
    for row in rows:
        measured = found[size_of(row)]
        for name in ("scipy", "fixed", "batched", "learned"):
            assert row[name] == str(round(measured["nanoseconds per sample"][name]))
        for column, name in RATIOS.items():
            assert row[column] == f"{measured['ratio'][name]:g}"


def test_samples_on_a_gpu() -> None:
    found = results("h200")
    rows = table_rows(PAGE, "## On an H200", "fixed", "batched / fixed")
    assert len(rows) == 2 * len(found) == 8
    goals: dict[str, list[float]] = {}
    for row in rows:
        measured = found[f"n = {row['n']}, 4096 rows"]
        mode = "" if row[""] == "eager" else ", graph"
        for column in ("fixed", "batched", "learned", "fixed, with log_prob"):
            name = column.replace("with ", "") + mode
            assert row[column] == f"{measured['nanoseconds per sample'][name]:.1f}"
        for column, name in RATIOS.items():
            if column != "fixed / scipy":
                ratio = measured["ratio"][" / ".join(f"{one}{mode}" for one in name.split(" / "))]
                assert row[column] == f"{ratio:g}"
                goals.setdefault(f"{column}, {row['']}", []).append(ratio)
    both = goals["batched / fixed, graph"] + goals["learned / fixed, graph"]
    values = {
        "batched and learned, graph": both,
        "learned with backward, graph": goals["with backward, graph"],
        "batched with log_prob, graph": goals["with log_prob, graph"],
        "batched, eager": goals["batched / fixed, eager"],
        "learned, eager": goals["learned / fixed, eager"],
        "learned with backward, eager": goals["with backward, eager"],
        "batched with log_prob, eager": goals["with log_prob, eager"],
    }
    title = "goal: at most 3 times fixed"
    shown = {
        row[title].split(";")[0]: row["result"] for row in table_rows(PAGE, "## On an H200", title)
    }
    assert set(shown) == set(values)
    for goal, ratios in values.items():
        verdict, figures = shown[goal].split(": ")
        assert figures == f"{min(ratios):g} to {max(ratios):g}"
        assert verdict.startswith("reached" if max(ratios) <= 3 else "missed")


def test_goals_follow_from_the_ratios() -> None:
    found = results("dimensions", "million")
    ratios = [row["ratio"] for row in found.values()]
    against_scipy = [row["ratio"]["fixed / scipy"] for n, row in found.items() if "128" not in n]
    names = [
        name for column, name in RATIOS.items() if column not in ("fixed / scipy", "with log_prob")
    ]
    goals = {
        "at most 2 times scipy up to n = 40": against_scipy,
        "batched and learned at most 3 times fixed, with backward": [
            row[name] for row in ratios for name in names
        ],
        "batched at most 3 times fixed, with log_prob (learned: not measured)": [
            row[RATIOS["with log_prob"]] for row in ratios
        ],
    }
    shown = {
        row["goal"]: row["result"] for row in table_rows(PAGE, "## Samples at kappa = n", "goal")
    }
    for goal, values in goals.items():
        assert shown[goal] == f"reached: {min(values):g} to {max(values):g}"
        assert max(values) <= (2 if "scipy" in goal else 3)


def test_other_libraries() -> None:
    """The tables of races are those of the ARM machine and of x86 before and after a change."""
    rows = table_rows(PAGE, "## Sample and log density", "kappa 1024", "kappa 16384")
    files = ("peers.json", "peers-x86.json", "peers-x86-2.json")
    names = ["randn", "ours", "ours, compiled", "ours, kappa a tensor", "tensorflow_probability"]
    compiled = "TFP / ours, compiled (goal 5: "
    ratio_rows = {"TFP / ours", f"{compiled}missed)", f"{compiled}reached)"}
    assert len(rows) == 6 + 7 + 7
    for file, table in zip(files, (rows[:6], rows[6:13], rows[13:]), strict=True):
        races = json.loads((PAGE.with_suffix("") / file).read_text())["peers"]
        assert {row[""] for row in table[:5]} == set(names)
        assert {row[""] for row in table[5:]} <= ratio_rows
        for row in table:
            for kappa in ("kappa 1024", "kappa 16384"):
                found = [races[f"{kappa}, race {number}"] for number in (1, 2, 3)]
                if row[""] in ratio_rows:
                    what = row[""].split(" (")[0].replace("TFP", "tensorflow_probability")
                    shown = [f"{race['ratio'][what]:g}" for race in found]
                    if row[""] == f"{compiled}reached)":
                        assert min(race["ratio"][what] for race in found) >= 5
                else:
                    shown = [f"{race['milliseconds'][row['']]:.1f}" for race in found]
                assert row[kappa] == ", ".join(shown), (file, row[""])
