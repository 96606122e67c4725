"""How often the diagnosis is right: writes bench/results/accuracy.json and docs/accuracy.md.

    python bench/accuracy [--only known,matrix,healthy,curve] [--shapes dp8,dp4-pp4] [--seeds N] [--healthy N]
    python bench/accuracy --only shapes [--shape plain,experts] [--fault hang|none] [--seeds A:B]
    python bench/accuracy --only shapes,matrix,healthy --journal FOLDER [--minutes 30]

Parts that are not run keep their last numbers. With --shapes, --seeds, --shape or --healthy nothing is kept: the
numbers are printed only. The part `shapes` (the second generator) runs held-out seeds unless --seeds is given.
With --journal, the parts of simulated jobs run in one process, in random order, for --minutes each. FOLDER holds the
results of each commit; the next run with the same FOLDER and commit continues there.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import known  # noqa: E402
import shape_runs  # noqa: E402
import simulated  # noqa: E402
from journal import Journal  # noqa: E402
from report import RESULTS, commit, machine  # noqa: E402

from page import page  # noqa: E402
from stallscope.synth.fault_scenarios import SHAPES  # noqa: E402

RESULT = RESULTS / "accuracy.json"
PAGE = FOLDER.parents[1] / "docs" / "accuracy.md"


def main() -> None:
    """Run the requested parts, and write the results."""
    asked = _asked()
    parts = _parts(asked)
    chosen = asked.only.split(",") if asked.only else list(parts)
    if unknown := set(chosen) - set(parts):
        sys.exit(f"accuracy: no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    is_look = bool(asked.shapes or asked.seeds or asked.healthy or asked.shape or asked.fault)
    if is_look and chosen == ["shapes"]:
        print(shape_runs.text({"misses": [], **_shapes(asked)}))
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() and not is_look else {}
    for name in chosen:
        begin = time.monotonic()
        matches = parts[name]()
        result[name] = matches | {
            "took_s": round(time.monotonic() - begin),
            "commit": commit(),
            "date": time.strftime("%F"),
        }
        print(f"{name}: {result[name]['took_s']} s", file=sys.stderr)
        if not is_look:
            result = {"benchmark": "accuracy", "machine": machine(), **result}
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if is_look:
        print(json.dumps(result, indent=1))
        return
    PAGE.write_text(page(result))
    print(_short(result))


def _asked() -> Namespace:
    parser = ArgumentParser(prog="accuracy", description=__doc__)
    parser.add_argument("--only", default="", help="parts to run, with commas between")
    parser.add_argument("--shapes", default="", help="shapes of the matrix, with commas between")
    parser.add_argument(
        "--seeds", default="", help="number of seeds of the matrix; A:B or A for the part shapes"
    )
    parser.add_argument("--shape", default="", help="shapes of the part shapes, with commas between")
    parser.add_argument("--fault", default="", help="one fault of the part shapes, or none")
    parser.add_argument("--healthy", type=int, default=0, help="healthy jobs")
    parser.add_argument("--journal", type=Path, help="folder of the results so far")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of each part, with --journal")
    return parser.parse_args()


def _parts(asked: Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    shapes = asked.shapes.split(",") if asked.shapes else list(SHAPES)
    return {
        "known": lambda: {
            "recordings": known.recordings(),
            "public": known.public(),
            "slowdowns": known.slowdowns(),
        },
        "matrix": lambda: simulated.matrix(
            shapes, n_seeds=int(asked.seeds or simulated.N_SEEDS), spread=_spread(asked, "matrix")
        ),
        "healthy": lambda: simulated.healthy(
            asked.healthy or simulated.N_HEALTHY, spread=_spread(asked, "healthy")
        ),
        "curve": simulated.curve,
        "shapes": lambda: _shapes(asked),
    }


def _spread(asked: Namespace, part: str) -> simulated.Spread:
    if not asked.journal:
        return simulated.spread
    return Journal(asked.journal / f"{part}-{commit()}.pickles", asked.minutes).spread()


def _shapes(asked: Namespace) -> dict[str, Any]:
    """The part `shapes`: some or all shapes, seeds and faults."""
    first = shape_runs.HELD_OUT
    begin, _, end = (asked.seeds or f"{first}:{first + shape_runs.N_SEEDS}").partition(":")
    seeds = range(int(begin), int(end or int(begin) + 1))
    shapes = asked.shape.split(",") if asked.shape else shape_runs.ALL_SHAPES
    if unknown := set(shapes) - set(shape_runs.ALL_SHAPES):
        sys.exit(f"accuracy: no shape {', '.join(unknown)}; there are {', '.join(shape_runs.ALL_SHAPES)}")
    spread = _spread(asked, "shapes")
    summary = shape_runs.summary(shape_runs.run(shapes, seeds, fault=asked.fault, spread=spread))
    if seeds.start >= shape_runs.HELD_OUT:
        del summary["misses"]  # a published held-out case would be tuned on
    return {"seeds": f"{seeds.start} to {seeds.stop - 1}", **summary}


def _short(result: dict[str, Any]) -> str:
    lines = []
    if "matrix" in result:
        matrix = result["matrix"]
        lines.append(
            f"{matrix['n']} simulated faults: culprit {matrix['culprit_right_percent']} %, "
            f"cause {matrix['cause_right_percent']} %, {matrix['n_accused']} ranks accused wrongly"
        )
    if "healthy" in result:
        matrix = result["healthy"]
        lines.append(f"{matrix['n']} healthy jobs: {matrix['n_ranks_accused']} ranks accused")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
