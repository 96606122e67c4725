"""On GPUs: one rank of a DDP job sleeps in a known function, at times or forever; does the verdict name the function?

    python bench/gpu/stacks.py [--ranks N] [--folder DIR]

Prints and stores, for each case, the reported location, whether it is the function's line, and the stack.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from prove import trace
from report import report
from running import HERE, Failed, end, explained, start_job
from scenarios import Scenario

FAULTS = (HERE / "faults.py").read_text().splitlines()
PLACES = {
    "sleep": ("_sleep.<locals>.<lambda>", "time.sleep(delay_ms"),
    "hang": ("forever", "time.sleep(3600)"),
}
"""The function that each sleeps in, and the text of its line."""


def main() -> None:
    """Run both, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        result = {name: told(name, folder / name, n_ranks=chosen.ranks) for name in PLACES}
    report("stacks_on_gpus", {"n_ranks": chosen.ranks, "told": result})


def told(name: str, folder: Path, *, n_ranks: int) -> dict[str, Any]:
    """The location that the verdict reports for the last rank."""
    fault = f"hang:{n_ranks - 1}" if name == "hang" else f"sleep:{n_ranks - 1}:14:290"
    scenario = Scenario(name, ("--fault", fault), 16 if name == "hang" else 12)
    job = start_job("job.py", folder, n_ranks=n_ranks, words=scenario.words)
    db = folder / "trace.db"
    try:
        trace(scenario, job, db, agent_words=())
    except Failed as failed:
        return {"is_right": False, "failed": str(failed)}
    finally:
        end(job.launcher)
    evidence = [index for verdict in explained(db)["verdicts"] for index in _places(verdict["evidence"])]
    at, stack = evidence[0] if evidence else ("", [])
    function, text = PLACES[name]
    line = next(i for i, entry in enumerate(FAULTS, 1) if text in entry)
    return {"is_right": f"faults.py:{line} " in at and at.endswith(function), "at": at, "stack": stack}


def _places(evidence: dict[str, Any]) -> list[tuple[str, list[str]]]:
    doing = evidence.get("doing")
    each = [evidence, *(doing if isinstance(doing, list) else [])]
    return [(entry["at"], entry["stack"]) for entry in each if "at" in entry]


if __name__ == "__main__":
    main()
