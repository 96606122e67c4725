"""Copies slowdowns that were measured on machines with GPUs to bench/results/slowdown.json.

    python bench/gpu/taking.py FILE...      # slowdown.json of prove.py

New results of a workload replace the stored result; several runs of one commit are pooled. The result of starting and
stopping the agent stays, with its machine, if the new runs did not measure it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from comparing import pooled

KEPT = Path(__file__).parents[1] / "results" / "slowdown.json"


def main() -> None:
    """Take all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in parser.parse_args().files:
        for entry in json.loads(path.read_text()):
            runs.setdefault(entry["workload"], []).append(entry)
    kept = {entry["workload"]: entry for entry in json.loads(KEPT.read_text())}
    for name, of in runs.items():
        if len({entry["machine"]["commit"] for entry in of}) > 1:
            sys.exit(f"taking: runs of {name} are of several commits: only runs of one commit can be pooled")
        new = pooled(of)
        kept[name] = new if "n_restarts" in new else _restarts(kept.get(name, {})) | new
    KEPT.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    for name in runs:
        print(f"{name}: {kept[name]['slowdown_percent']} +- {kept[name]['spread_percent']} %")


def _restarts(before: dict[str, Any]) -> dict[str, Any]:
    """The result of starting and stopping the agent, and the machine that it was measured on."""
    found = {key: value for key, value in before.items() if "restart" in key}
    return {"restarted_machine": before["machine"]} | found if found else {}


if __name__ == "__main__":
    main()
