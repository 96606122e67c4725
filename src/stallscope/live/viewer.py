"""Starts the viewer process, which runs as long as the agent; the agent itself stays small."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast

_END_S = 10.0


@contextmanager
def viewer_process(db: Path, *, is_json: bool) -> Iterator[TextIO]:
    """Show the trace inside the with block. Lines written to the returned file appear as the agent's notes.

    The viewer ends by itself when the agent ends, in any way. The agent continues when the viewer ends.
    """
    task = {
        "db": str(db),
        "since_ns": time.monotonic_ns(),
        "agent": os.getpid(),
        "is_json": is_json,
    }
    shown = subprocess.Popen(
        [sys.executable, "-m", "stallscope.live.viewer_process", json.dumps(task)],
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert shown.stdin is not None
    try:
        yield cast(TextIO, shown.stdin)
    finally:
        with suppress(OSError):
            shown.stdin.close()
        try:
            shown.wait(_END_S)
        except subprocess.TimeoutExpired:
            shown.kill()
            shown.wait()
