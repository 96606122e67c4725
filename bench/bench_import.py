"""Time to turn recordings into node traces: events read, ledger computed, rows written.

Reads every recording in $STALLSCOPE_DATA/recordings (default: ../shared, next to the repository), or the shipped
recording if there is none. Best of several turns for each recording.
"""

import os
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from report import FOLDER, report

from stallscope.importers import importer_for
from stallscope.store import node

N_TURNS = 3


def main() -> None:
    """Measure and report."""
    measureds = [measured(folder) for folder in recordings()]
    n_events, seconds = (
        sum(entry["n_events"] for entry in measureds),
        sum(entry["import_s"] for entry in measureds),
    )
    report(
        "import", {"events_per_s": round(n_events / seconds), "n_events": n_events, "recordings": measureds}
    )


def recordings() -> list[Path]:
    """The recording folders to import."""
    data = Path(os.environ.get("STALLSCOPE_DATA") or FOLDER.parent.parent / "shared")
    parents = sorted(path.parent for path in (data / "recordings").glob("*/events.parquet"))
    return parents or [FOLDER.parent / "tests" / "data" / "recorded"]


def measured(folder: Path) -> dict[str, float | int | str]:
    """Times and sizes of one recording."""
    n_events = pq.read_metadata(folder / "events.parquet").num_rows
    read_s, write_s, db_bytes = min(timed(folder) for _ in range(N_TURNS))
    return {
        "recording": folder.name,
        "n_events": n_events,
        "import_s": round(read_s + write_s, 3),
        "read_s": round(read_s, 3),
        "write_s": round(write_s, 3),
        "events_per_s": round(n_events / (read_s + write_s)),
        "parquet_bytes": sum(path.stat().st_size for path in folder.glob("*.parquet")),
        "db_bytes": db_bytes,
    }


def timed(folder: Path) -> tuple[float, float, int]:
    """Seconds to read a recording, seconds to write the trace, and its size."""
    with tempfile.TemporaryDirectory() as target:
        begin = time.perf_counter()
        trace = importer_for(folder).read(folder)
        read = time.perf_counter()
        node.write(Path(target) / "trace.db", trace)
        end = time.perf_counter()
        return read - begin, end - read, (Path(target) / "trace.db").stat().st_size


if __name__ == "__main__":
    main()
