"""Three agents' APIs over the parts of one simulated job, in threads of the test's own process."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stallscope.events.layout import TABLES
from stallscope.events.trace import Trace
from stallscope.query.remote_nodes import Access
from stallscope.serve import node_api as api
from stallscope.serve.node_files import NodeFiles
from stallscope.store import node as store
from stallscope.synth import ClockSpread, HostStall, Job, Schedule, simulate

VICTIM = 5


def job_trace() -> Trace:
    """12 ranks on 3 machines; rank 5, on the second, sleeps every third step."""
    fault = HostStall(
        cause="host_sleep", ranks=(VICTIM,), delay_ns=90_000_000, schedule=Schedule(first=8, every=3)
    )
    job = Job(dp=12, ranks_per_node=4, steps=40)
    return simulate(job, [fault], seed=3, clocks=ClockSpread(), has_twin=False)[0]


def part(trace: Trace, number: int) -> Trace:
    """The trace of one machine's agent."""
    tables = {table.name: getattr(trace, table.name) for table in TABLES}
    tables = {name: rows[rows["node"] == number].copy() for name, rows in tables.items()}
    for rows in tables.values():
        rows["node"] = 0
    clocks = tuple(dataclasses.replace(c, node=0) for c in trace.clocks if c.node == number)
    return dataclasses.replace(
        trace,
        **tables,
        nodes=(trace.nodes[number],),
        clocks=clocks,
        ends_ns=trace.ends_ns[number : number + 1],
    )


@dataclass(frozen=True)
class Fleet:
    """Running agents: their addresses in order, their traces on disk, and the whole trace."""

    addresses: list[str]
    files: NodeFiles
    dbs: list[Path]
    whole: Path

    @property
    def token(self) -> str:
        return self.files.token.read_text().strip()

    def access(self, **changes: object) -> Access:
        return Access(**{"token": self.token, "ca": self.files.ca, **changes})


@contextmanager
def served(options: api.Options, **parts: object) -> Iterator[str]:
    """One API in a thread; gives its address."""
    message: list[str] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            api.serve(options, announce=message.append, stop=stop, **parts)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        end_s = time.monotonic() + 20
        while not message and not failed and time.monotonic() < end_s:
            time.sleep(0.01)
        if failed:
            raise failed[0]
        yield message[0].split("://")[1].split()[0]
    finally:
        stop.set()
        thread.join()


@contextmanager
def fleet(folder: Path, trace: Trace) -> Iterator[Fleet]:
    """An API for each machine of the trace; they share certificates and tokens."""
    store.write(folder / "whole.db", trace)
    files, dbs = NodeFiles(folder / "api"), [folder / f"{name}.db" for name in trace.nodes]
    contexts = []
    try:
        addresses = []
        for number, (name, db) in enumerate(zip(trace.nodes, dbs, strict=True)):
            store.write(db, part(trace, number))
            options = api.Options(db=db, listen="127.0.0.1:0", node=name, files=files.folder)
            contexts.append(served(options))
            addresses.append(contexts[-1].__enter__())
        yield Fleet(addresses, files, dbs, folder / "whole.db")
    finally:
        for context in contexts:
            context.__exit__(None, None, None)
