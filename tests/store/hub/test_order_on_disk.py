"""Rows are on disk before the sender's acknowledgement, observed from outside by system calls of the store."""

import re
import shutil
import subprocess
import sys

import pytest

WRITER = """
import os, pathlib, sys
import pyarrow as pa
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import Batch, HubStore
store = HubStore.open(pathlib.Path(sys.argv[1]), Limits(maintenance_s=3600, settle_s=0))
for number in range(3):
    rows = pa.table({"ts_ns": [1_795_000_000_000_000_000 + number], "name": [f"row {number}"]})
    os.write(1, f"begin {number}\\n".encode())
    store.append(Batch(f"b{number}", "a", {"events": rows})).result()
    os.write(1, f"acknowledged {number}\\n".encode())
os.write(1, b"sealing\\n")
store.seal_all()
os.write(1, b"sealed\\n")
store.close()
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The system calls of all the writer's threads, in order."""
    if not shutil.which("strace"):
        pytest.skip("no strace to look at system calls with")
    folder = tmp_path_factory.mktemp("traced")
    output = folder / "calls"
    wanted = "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink"
    command = [
        "strace",
        "-f",
        "-y",
        "-e",
        wanted,
        "-o",
        str(output),
        sys.executable,
        "-c",
        WRITER,
        str(folder / "hub"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip("strace may not look at processes here")
    assert done.returncode == 0, done.stderr
    return output.read_text().splitlines()


def between(calls: list[str], begin: str, end: str) -> list[str]:
    first = next(i for i, call in enumerate(calls) if f'"{begin}\\n"' in call)
    last = next(i for i, call in enumerate(calls) if f'"{end}\\n"' in call)
    return calls[first + 1 : last]


def at(calls: list[str], pattern: str) -> list[int]:
    return [i for i, call in enumerate(calls) if re.search(pattern, call)]


@pytest.mark.parametrize("number", range(3))
def test_the_log_is_synced_after_its_last_write_and_before_the_acknowledgement(calls: list[str], number: int):
    during = between(calls, f"begin {number}", f"acknowledged {number}")
    writes = at(during, r"\bp?write(64)?\(\d+<[^>]*hub\.duckdb\.wal>")
    syncs = at(during, r"\bf(data)?sync\(\d+<[^>]*hub\.duckdb\.wal>")
    assert writes and syncs and syncs[-1] > writes[-1]


def test_a_segment_is_synced_and_named_before_its_rows_leave_the_journal(calls: list[str]):
    during = between(calls, "sealing", "sealed")
    file_sync = at(during, r"\bf(data)?sync\(\d+<[^>]*\.part>")
    rename = at(during, r"\brename.*\.part.*\.parquet")
    folder_sync = at(during, r"\bf(data)?sync\(\d+<[^>]*segments/a/events>")
    log_sync = at(during, r"\bf(data)?sync\(\d+<[^>]*hub\.duckdb\.wal>")
    data = at(during, r"\bp?write(64)?\(\d+<[^>]*\.part>")
    assert data[-1] < file_sync[0] < rename[0] < folder_sync[0] < log_sync[-1]
    assert not at(during[: folder_sync[0]], r"write(64)?\(\d+<[^>]*hub\.duckdb\.wal>")
