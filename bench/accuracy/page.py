"""docs/accuracy.md from the numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from cases import CASES

HEAD = """# How often the diagnosis is right

<!-- Written by bench/accuracy from bench/results/accuracy.json: run `make accuracy`. -->

- Right: the report names exactly the culprits. If no rank is a culprit, or the records cannot show the culprit, right
  means that the report names no rank and reports the actual kind of problem.
- Wrong: the report names another rank.
- Abstained: the report omits part of the facts that the records show.

[Thresholds](reference/thresholds.md) lists the thresholds with their reasons, and
[decisions/naming-a-rank.md](decisions/naming-a-rank.md) the conditions under which a rank is named.
"""

FIT = """
The simulator was written independently of the diagnosis and imports no part of it. Its parameters (host time of a
layer, scatter of one call, wander of a rank from step to step, spikes, bandwidths, warm-up) were measured on healthy
ranks of the recordings. `tests/synth/test_fit.py` measures recordings and simulated jobs again and fails when their
lateness differs. [decisions/simulator.md](decisions/simulator.md) has the table and the limits of the model.
A simulator alone proves little. The recordings and public data above test whether the diagnosis is right; the simulator
shows how well that holds over shapes, sizes, delays and scatter.
"""

SHAPES_HEAD = """
A second generator simulates jobs by other means: hosts, launch queues, streams and collectives as a discrete-event
simulation ([decisions/second-generator.md](decisions/second-generator.md)). Its shapes are not in the matrix below.
Accused: a straggler, hang, mismatch, device or failure verdict names a rank of a healthy job. Other remark: neither
healthy nor inconclusive, and no rank is named. Wrong rank: a verdict names a rank that is not the culprit. Missed:
the report is healthy, or names no rank, although the fault costs at least 5 % of the time. A slowdown of the whole
job is right where a verdict `change` reports it. The true cost is how much
longer the job lasts than the same job without the fault, times the ranks that are not named. A cost is right within
10 %, or as a range that contains the truth and ends at most at three times the truth. Where an agent attached late or
ended early, the time in which only some agents watched may count or not.
"""


def page(result: dict[str, Any]) -> str:
    """The whole page, without the parts that were never run."""
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


def _shapes(result: dict[str, Any]) -> str:
    """The shapes of the second generator, the weakest first."""
    names = (
        *("shape", "healthy jobs", "accused", "inconclusive", "other remark"),
        *("faults", "right", "wrong rank", "missed", "inconclusive", "cause right", "cost right"),
    )
    rows = [_shape(name, row) for name, row in [("all", result["total"]), *result["by_shape"].items()]]
    faults = [
        (name, *(row[key] for key in ("n", "right", "wrong", "missed", "inconclusive")), *_judged(row))
        for name, row in result["by_fault"].items()
    ]
    columns = ("fault", "jobs", "right", "wrong rank", "missed", "inconclusive", "cause right", "cost right")
    return (
        f"\n## Job shapes of a second generator\n{SHAPES_HEAD}\n{_headline(result)}\n\n"
        f"The weakest shapes first:\n\n{_table(names, rows)}\n{_table(columns, faults)}"
    )


def _headline(result: dict[str, Any]) -> str:
    healthy, faults = result["total"]["healthy"], result["total"]["faults"]
    _, cost = _judged(faults)
    return (
        f"**{healthy['n']} healthy jobs: {healthy['accused']} accuse a rank, {healthy['inconclusive']} are "
        f"inconclusive. {faults['n']} faults: {faults['right']} right, {faults['wrong']} with a wrong rank, "
        f"{faults['missed']} missed, {faults['inconclusive']} inconclusive; {cost} costs within the bounds.** "
        f"Seeds {result['seeds']}, {_sample(result, healthy['n'] + faults['n'])}commit {result['commit']}."
    )


def _sample(result: dict[str, Any], n: int) -> str:
    """That the numbers are from a part of the planned jobs, where they are."""
    planned = result.get("n_planned", n)
    return f"a random sample of {n} of {planned} planned jobs, " if n < planned else ""


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


def _known(result: dict[str, Any]) -> str:
    keys = ("name", "truth", "said", "culprit", "cause", "cost_gpu_seconds")
    rows = [tuple(recording[key] or "-" for key in keys) for recording in result["recordings"]]
    names = ("recording", "truth", "report", "culprit", "cause", "cost, GPU s")
    public = [tuple(data[key] for key in ("name", "truth", "said", "mark")) for data in result["public"]]
    slow = "; ".join(
        f"{trace['name']}: {trace['said']} reported, {trace['makers']} simulated"
        for trace in result["slowdowns"]
    )
    return (
        f"\n## Recordings of real jobs\n\n{_table(names, rows)}\n"
        f"## Public data\n\n{_table(('data', 'truth', 'report', 'mark'), public)}\n"
        f"Slowdown of the pipeline traces against an ideal run; the authors of the data simulated it: {slow}.\n"
    )


def _matrix(result: dict[str, Any]) -> str:
    names = (
        "",
        "jobs",
        "culprit right",
        "wrong",
        "abstained",
        "cause right",
        "wrong",
        "abstained",
        "reported / true cost",
    )
    by_fault = [_rates(name, row) for name, row in result["by_fault"].items()]
    by_shape = [_rates(name, row) for name, row in result["by_shape"].items()]
    misses = [
        (miss["shape"], miss["fault"], miss["seed"], miss["culprit"], miss["cause"] or "-", miss["said"])
        for miss in result["misses"]
    ]
    return (
        f"\n## Simulated faults\n{FIT}\n"
        "Every fault in every suitable shape, 20 seeds (fewer above 32 ranks). The seed determines the culprit and the "
        f"moments. {result['n']} jobs, {_sample(result, result['n'])}commit {result['commit']}. "
        f"**Culprit right in {result['culprit_right_percent']} %, "
        f"cause right in {result['cause_right_percent']} %, {result['n_accused']} ranks accused wrongly.**\n\n"
        "The true cost is the additional waiting time of all ranks except the culprits, compared with the same job "
        "without the fault. The last column has the 10th, 50th and 90th percentile. Costs that the report states "
        "as lower bounds are included; ranges are not.\n\n"
        f"{_table(('fault', *names[1:]), by_fault)}\n{_table(('shape', *names[1:]), by_shape)}\n"
        + (
            f"Each miss:\n\n{_table(('shape', 'fault', 'seed', 'culprit', 'cause', 'report'), misses)}"
            if misses
            else "No miss.\n"
        )
    )


def _rates(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    ratio = row["cost_ratio"]
    cause = (
        row["cause"] if sum(row["cause"].values()) else dict.fromkeys(("right", "wrong", "abstained"), "-")
    )
    return (
        name,
        row["n"],
        *(row["culprit"][mark] for mark in ("right", "wrong", "abstained")),
        *(cause[mark] for mark in ("right", "wrong", "abstained")),
        ", ".join(f"{q:.2f}" for q in ratio) if ratio else "-",
    )


def _healthy(result: dict[str, Any]) -> str:
    otherwise: dict[str, int] = {}
    for job in result["said_otherwise"]:
        otherwise[job["said"]] = otherwise.get(job["said"], 0) + 1
    rows = sorted(otherwise.items(), key=lambda item: -item[1])
    return (
        f"\n## Healthy jobs\n\n{result['n']} simulated healthy jobs: four of five with random shape, scatter, clocks "
        f"and capture, the remaining jobs in the shapes above; {_sample(result, result['n'])}"
        f"commit {result['commit']}. **{result['n_ranks_accused']} ranks accused**; "
        f"{result['n_called_healthy']} jobs reported as healthy.\n"
        + (f"\n{_table(('report', 'jobs'), rows)}" if rows else "")
    )


def _curve(result: dict[str, Any]) -> str:
    names = ("scatter, ms", *(f"{ms} ms" for ms in result["delays_ms"]))
    rows = [(row["scatter_ms"], *(f"{n} %" for n in row["named_percent"])) for row in result["rows"]]
    return (
        "\n## Smallest delay that names a culprit\n\nOne rank of 8 sleeps in every fifth step of 60. The table has the "
        f"share of {result['n_each']} jobs in which the rank is named, by delay and by the scatter of the ranks (95th "
        "percentile of their lateness in the healthy job; the second row matches the recorded jobs). Ranks accused "
        "wrongly: "
        f"{result['n_accused']}.\n\n{_table(names, rows)}"
    )


def _cases() -> str:
    rows = [(name, case.test or "-", case.why_not or case.description) for name, case in CASES.items()]
    return (
        "\n## Known cases\n\nPublic reports of slow or hung jobs with a known cause, by their number in the "
        f"collection, and the test of each.\n\n{_table(('case', 'test', 'subject'), rows)}"
    )


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
