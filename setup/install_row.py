"""Adds a row to a result of prove_install.sh: install_row.py RESULT COMMIT ROW. Rows of other commits are dropped."""

import fcntl
import json
import platform
import sys
from pathlib import Path
from typing import Any


def with_row(result: dict[str, Any], commit: str, row: dict[str, Any]) -> dict[str, Any]:
    """The result with the row in place of an earlier row of the same artefact."""
    earlier = result["artefacts"] if result.get("commit") == commit else []
    kept = [each for each in earlier if each["artefact"] != row["artefact"]]
    return {"commit": commit, "python": f"Python {platform.python_version()}", "artefacts": [*kept, row]}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = path.read_text()
        result = with_row(json.loads(before) if before else {}, sys.argv[2], json.loads(sys.argv[3]))
        path.write_text(json.dumps(result, indent=4) + "\n")
