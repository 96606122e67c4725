"""docs/accuracy.md from the numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from cases import CASES

HEAD = """# How often the diagnosis is right

<!-- Written by bench/accuracy from bench/results/accuracy.json: run `make accuracy`. -->

Right: exactly the guilty ranks are named. Wrong: somebody else is. Abstained: not all that could be known was said.
Where nobody is guilty, or the records cannot tell who is, naming nobody and saying what it is instead is right.
The thresholds behind it, each with its reason, are in [reference/thresholds.md](reference/thresholds.md); when a
rank is named at all is in [decisions/naming-a-rank.md](decisions/naming-a-rank.md).
"""

FIT = """
The simulator was written apart from the diagnosis and imports nothing of it. Its parameters (host time of a layer,
scatter of one call, wander of a rank from step to step, spikes, bandwidths, warm-up) were measured on the
recordings of healthy ranks, and `tests/synth/test_fit.py` measures recordings and simulated jobs again and fails
when their lateness parts: [decisions/simulator.md](decisions/simulator.md) has the table, and what is not modelled.
Numbers from a simulator prove little alone; the recordings and public data above are the test, the simulator tells
how it holds over shapes, sizes, delays and scatter.
"""

SHAPES_HEAD = """
A second generator simulates jobs by other means: hosts, launch queues, streams and collectives as a discrete-event
simulation ([decisions/second-generator.md](decisions/second-generator.md)). Its shapes are not in the matrix below.
Accused: a straggler, hang, mismatch, device or failure verdict names a rank of a healthy job. Other remark: neither
healthy nor inconclusive, and no rank is named. Wrong rank: a verdict names a rank that is not the culprit. Missed:
the report is healthy, or names no rank, although the fault costs at least 5 % of the time. The true cost is how much
longer the job lasts than the same job without the fault, times the ranks that are not named. A cost is right within
10 %, or as a range that contains the truth and ends at most at three times the truth.
"""


def page(result: dict[str, Any]) -> str:
    """The whole page; parts that were never run are left out."""
    parts = [HEAD]
    if "shapes" in result:
        parts.append(_shapes(result["shapes"]))
    if "known" in result:
        parts.append(_known(result["known"]))
    if "matrix" in result:
        parts.append(_matrix(result["matrix"]))
    if "healthy" in result:
        parts.append(_healthy(result["healthy"]))
    if "curve" in result:
        parts.append(_curve(result["curve"]))
    parts.append(_cases())
    return "\n".join(parts)


def _shapes(found: dict[str, Any]) -> str:
    """The shapes of the second generator, the weakest first."""
    names = (
        *("shape", "healthy jobs", "accused", "inconclusive", "other remark"),
        *("faults", "right", "wrong rank", "missed", "inconclusive", "cause right", "cost right"),
    )
    rows = [_shape(name, row) for name, row in [("all", found["total"]), *found["by_shape"].items()]]
    faults = [
        (name, *(row[key] for key in ("n", "right", "wrong", "missed", "inconclusive")), *_judged(row))
        for name, row in found["by_fault"].items()
    ]
    columns = ("fault", "jobs", "right", "wrong rank", "missed", "inconclusive", "cause right", "cost right")
    return (
        f"\n## Job shapes of a second generator\n{SHAPES_HEAD}\n{_headline(found)}\n\n"
        f"The weakest shapes first:\n\n{_table(names, rows)}\n{_table(columns, faults)}"
    )


def _headline(found: dict[str, Any]) -> str:
    healthy, faults = found["total"]["healthy"], found["total"]["faults"]
    _, cost = _judged(faults)
    return (
        f"**{healthy['n']} healthy jobs: {healthy['accused']} accuse a rank, {healthy['inconclusive']} are "
        f"inconclusive. {faults['n']} faults: {faults['right']} right, {faults['wrong']} with a wrong rank, "
        f"{faults['missed']} missed, {faults['inconclusive']} inconclusive; {cost} costs within the bounds.** "
        f"Seeds {found['seeds']}, commit {found['commit']}."
    )


def _shape(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    healthy, faults = row["healthy"], row["faults"]
    return (
        name,
        *(healthy[key] for key in ("n", "accused", "inconclusive", "missed")),
        *(faults[key] for key in ("n", "right", "wrong", "missed", "inconclusive")),
        *_judged(faults),
    )


def _judged(row: dict[str, Any]) -> tuple[str, str]:
    """Right causes and costs, of the causes and costs that were judged."""
    return (
        f"{row['cause_right']} of {row['cause_right'] + row['cause_wrong']}",
        f"{row['cost_right']} of {row['cost_right'] + row['cost_wrong']}",
    )


def _known(found: dict[str, Any]) -> str:
    rows = [
        (
            one["name"],
            one["truth"],
            one["said"],
            one["culprit"],
            one["cause"] or "-",
            one["cost_gpu_seconds"] or "-",
        )
        for one in found["recordings"]
    ]
    names = ("recording", "truth", "said", "culprit", "cause", "cost, GPU s")
    public = [(one["name"], one["truth"], one["said"], one["mark"]) for one in found["public"]]
    slow = "; ".join(
        f"{one['name']}: {one['said']} said, {one['makers']} theirs" for one in found["slowdowns"]
    )
    return (
        f"\n## Recordings of real jobs\n\n{_table(names, rows)}\n"
        f"## Public data\n\n{_table(('data', 'truth', 'said', 'mark'), public)}\n"
        f"Slowdown of the pipeline traces against an ideal run, as their makers simulated it: {slow}.\n"
    )


def _matrix(found: dict[str, Any]) -> str:
    names = (
        "",
        "jobs",
        "culprit right",
        "wrong",
        "abstained",
        "cause right",
        "wrong",
        "abstained",
        "cost said / true",
    )
    by_fault = [_rates(name, one) for name, one in found["by_fault"].items()]
    by_shape = [_rates(name, one) for name, one in found["by_shape"].items()]
    misses = [
        (one["shape"], one["fault"], one["seed"], one["culprit"], one["cause"] or "-", one["said"])
        for one in found["misses"]
    ]
    return (
        f"\n## Simulated faults\n{FIT}\n"
        f"{found['n']} jobs: every fault in every shape it fits in, 20 seeds (shapes above 32 ranks: fewer), the "
        f"guilty rank and the moments drawn from the seed. **Culprit right in {found['culprit_right_percent']} %, "
        f"cause right in {found['cause_right_percent']} %, {found['n_accused']} ranks accused wrongly.**\n\n"
        "The cost is compared with what all ranks but the guilty waited longer than in the same job without the "
        "fault (10th, 50th, 90th percentile). Where the report calls it a lower bound, it is one.\n\n"
        f"{_table(('fault', *names[1:]), by_fault)}\n{_table(('shape', *names[1:]), by_shape)}\n"
        + (
            f"Each miss:\n\n{_table(('shape', 'fault', 'seed', 'culprit', 'cause', 'said'), misses)}"
            if misses
            else "No miss.\n"
        )
    )


def _rates(name: str, one: dict[str, Any]) -> tuple[Any, ...]:
    ratio = one["cost_ratio"]
    cause = (
        one["cause"] if sum(one["cause"].values()) else dict.fromkeys(("right", "wrong", "abstained"), "-")
    )
    return (
        name,
        one["n"],
        *(one["culprit"][mark] for mark in ("right", "wrong", "abstained")),
        *(cause[mark] for mark in ("right", "wrong", "abstained")),
        ", ".join(f"{q:.2f}" for q in ratio) if ratio else "-",
    )


def _healthy(found: dict[str, Any]) -> str:
    otherwise: dict[str, int] = {}
    for one in found["said_otherwise"]:
        otherwise[one["said"]] = otherwise.get(one["said"], 0) + 1
    rows = sorted(otherwise.items(), key=lambda item: -item[1])
    return (
        f"\n## Healthy jobs\n\n{found['n']} simulated healthy jobs, four in five of a shape, scatter, clocks and "
        f"capture drawn at random, the others in the shapes above: **{found['n_ranks_accused']} ranks accused**, "
        f"{found['n_called_healthy']} called healthy.\n"
        + (f"\n{_table(('said instead', 'jobs'), rows)}" if rows else "")
    )


def _curve(found: dict[str, Any]) -> str:
    names = ("scatter, ms", *(f"{ms} ms" for ms in found["delays_ms"]))
    rows = [(one["scatter_ms"], *(f"{n} %" for n in one["named_percent"])) for one in found["rows"]]
    return (
        "\n## From which delay a culprit is named\n\nOne rank of 8 sleeps every fifth step of a job of 60; share of "
        f"{found['n_each']} jobs in which it is named, by the delay and by how much the ranks scatter anyway (95 % of "
        "their lateness in the healthy job; the second row scatters as the recorded jobs do). Ranks accused wrongly: "
        f"{found['n_accused']}.\n\n{_table(names, rows)}"
    )


def _cases() -> str:
    rows = [(name, one.test or "-", one.why_not or one.says) for name, one in CASES.items()]
    return (
        "\n## Known cases\n\nReports of slow or hung jobs whose cause is known (by their number in the collection they "
        f"come from), and the test that stands for each.\n\n{_table(('case', 'test', 'says'), rows)}"
    )


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
