"""Files of other tools that cannot be read, and the option of the other tool that writes a readable file."""

import re
from pathlib import Path

from stallscope.events.layout import SQLITE_MAGIC, is_node_trace
from stallscope.importers.texts import archive_words


def remedy(file: Path, head: bytes) -> str:
    """The reason why a file cannot be imported, in the middle of a sentence after its name."""
    name = file.name.lower()
    if archive := archive_words(file):
        return f"is {archive}: unpack it, and give the folder"
    if not head:
        return "is empty or cannot be read: copy it again, or check its permissions"
    if name.endswith((".nsys-rep", ".qdrep")):
        return (
            f"is an Nsight Systems report: write a readable file with `nsys export --type sqlite {file.name}`"
        )
    if name.endswith(".ncu-rep"):
        return (
            "is an Nsight Compute report, which covers one kernel at a time and shows no waits between ranks"
        )
    if re.match(r"events\.out\.tfevents", file.name):
        return "is a TensorBoard event file: use torch.profiler's export_chrome_trace or tensorboard_trace_handler"
    if head[:4] == b"PK\x03\x04" and b"data.pkl" in head:
        return "is a checkpoint written by torch.save, not a dump: pass the flight-recorder dump"
    if head[:4] == b"\x7fELF":
        return (
            "is a program or core file: write its stacks with `gdb -p PID -batch -ex 'thread apply all bt'`"
        )
    if head[:4] == b"PAR1":
        return "is a Parquet file without the columns of a recording or of a pipeline trace"
    if is_node_trace(head):
        return "is a node trace: pass it alone; several: `stallscope merge A B -o ALL.db`"
    if head[:16] == SQLITE_MAGIC:
        return "is an SQLite file without the tables of a node trace or an Nsight Systems export"
    if head[:1] == b"\x80":
        return "is a pickle without the fields of a flight-recorder dump"
    return "is not a file that can be imported: `stallscope import --help` lists the kinds"
