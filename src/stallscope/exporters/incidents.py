"""Incidents as they open and close, found by a process beside the agent, which stays as small as without."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_END_S = 15.0


@contextmanager
def found_beside(
    db: Path,
    take: Callable[[dict[str, Any]], None],
    thresholds: Mapping[str, Any],
    usd_per_gpu_hour: float | None = None,
) -> Iterator[None]:
    """Inside the with block incidents of the trace are given to `take`, from a thread; see live/incidents.py.

    thresholds: of diagnose/thresholds.py, by name.

    The agent goes on when the process ends. At the end of the block what is still open is given as closed.
    """
    task = {
        "db": str(db),
        "since_ns": time.monotonic_ns(),
        "thresholds": dict(thresholds),
        "usd_per_gpu_hour": usd_per_gpu_hour,
    }
    finder = subprocess.Popen(
        [sys.executable, "-m", "stallscope.live.incidents", json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    def read() -> None:
        for line in finder.stdout or ():
            take(json.loads(line))

    reader = threading.Thread(target=read, daemon=True, name="incidents")
    reader.start()
    try:
        yield
    finally:
        with suppress(OSError):
            if finder.stdin:
                finder.stdin.close()
        try:
            finder.wait(_END_S)
        except subprocess.TimeoutExpired:
            finder.kill()
            finder.wait()
        reader.join(_END_S)
        if finder.stdout:
            finder.stdout.close()
