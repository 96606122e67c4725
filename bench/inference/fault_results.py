"""Merge runs of faults into results/inference_faults.json: python bench/inference/fault_results.py RUNS...

RUNS: files of runs, from prove_faults.py --journal or lanes.py. All runs must have the same commit. A table by fault
and engine is printed. Exits with 1 if there are fewer than 60 runs, if fewer than 95 % of them are right, or if a fault
ran on one engine only.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from prove_faults import FAULTS
from report import report

MIN_RUNS, MIN_SHARE, MIN_KINDS = 60, 0.95, 2


def short(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its process IDs and the folders of its files."""
    verdicts = run.get("verdicts") or [{}]
    first = next(
        (each for each in verdicts if run["named_after_s"] is None or each["kind"] == "dead_server"), {}
    )
    out = {name: run[name] for name in ("kind", "fault", "seed", "is_right", "named_after_s")}
    return out | {
        "verdict": first.get("kind", ""),
        "cause": first.get("cause", ""),
        "line": (first.get("line") or "").rpartition("/")[2],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Right and all runs of each fault on each engine."""
    kinds = sorted({each["kind"] for each in runs})
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for each in runs:
        cells[each["fault"], each["kind"]].append(each["is_right"])
    lines = ["".join(f"{name:16}" for name in ("fault", *kinds))]
    for fault in FAULTS:
        counts = [cells[fault, kind] for kind in kinds]
        lines.append(f"{fault:16}" + "".join(f"{f'{sum(c)} of {len(c)}' if c else '-':16}" for c in counts))
    return "\n".join(lines)


def main() -> None:
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    runs = list({(run["kind"], run["fault"], run["seed"]): run for run in map(json.loads, lines)}.values())
    commits = {each["commit"] for each in runs}
    if len(commits) != 1:
        raise SystemExit(f"the runs have {len(commits)} commits: {', '.join(sorted(commits))}")
    kinds: dict[str, set[str]] = defaultdict(set)
    for each in runs:
        kinds[each["fault"]].add(each["kind"])
    rare = [fault for fault in FAULTS if len(kinds[fault]) < MIN_KINDS]
    n_right = sum(each["is_right"] for each in runs)
    numbers = {
        "runs_commit": commits.pop(),
        "n_runs": len(runs),
        "n_right": n_right,
        "n_pairs": len({(each["kind"], each["fault"]) for each in runs}),
        "n_engines": len({each["kind"] for each in runs}),
        "faults_on_one_engine": rare,
        "runs": sorted(
            (short(each) for each in runs), key=lambda run: (run["fault"], run["kind"], run["seed"])
        ),
    }
    report("inference_faults", numbers)
    print(table(runs))
    for each in runs:
        if not each["is_right"]:
            print(f"WRONG {each['kind']} {each['fault']} {each['seed']}: {each.get('verdicts')}"[:300])
    print(f"{n_right} of {len(runs)} right ({100 * n_right / max(len(runs), 1):.1f} %)")
    if len(runs) < MIN_RUNS or n_right < MIN_SHARE * len(runs) or rare:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
