"""Incidents as they open and close, from a separate process, so that the agent itself stays small."""

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
def incident_finder(
    db: Path,
    take: Callable[[dict[str, Any]], None],
    thresholds: Mapping[str, Any],
    usd_per_gpu_hour: float | None = None,
    alerts: Path | None = None,
) -> Iterator[None]:
    """Pass the incidents of the trace to `take` inside the with block, from a thread; see live/incident_lines.py.

    thresholds: of diagnose/thresholds.py, by name. alerts: the file of alerts; None sends no alerts.

    The agent continues if the process ends. At the end of the block, open incidents are passed as closed.
    """
    task = {
        "db": str(db),
        "since_ns": time.monotonic_ns(),
        "thresholds": dict(thresholds),
        "usd_per_gpu_hour": usd_per_gpu_hour,
        "alerts": str(alerts) if alerts else None,
    }
    finder = subprocess.Popen(
        [sys.executable, "-m", "stallscope.live.incident_lines", json.dumps(task)],
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
