"""A live job: real processes that run the loop, disturbed from inside or outside, and its ground truth."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stallscope.demo import build, outside
from stallscope.demo.faults import FAULTS
from stallscope.demo.plan import Plan
from stallscope.errors import BadInput, StallscopeError

POLL_S = 0.05
TRUTH_FILE = "truth.json"
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Job:
    """A started job. folder holds plan.json, rank<R>.csv and, at the end, truth.json; pids in rank order."""

    plan: Plan
    folder: Path
    processes: tuple[subprocess.Popen[str], ...]
    has_begun: threading.Event

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self.processes]

    def go(self) -> None:
        """Lets the ranks leave the gate; before, they have only loaded the libraries."""
        for process in self.processes:
            if process.stdin is None:
                raise StallscopeError("the job has no gate")
            process.stdin.write("go\n")
            process.stdin.flush()
        self.has_begun.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for all ranks to end; False after the timeout. Raises when a rank failed."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            codes = [process.poll() for process in self.processes]
            for rank, code in enumerate(codes):
                if code:
                    words = self._words(rank)
                    raise StallscopeError(f"rank {rank} of the demo job ended with code {code}: {words}")
            if None not in codes:
                return True
            time.sleep(POLL_S)
        return False

    def _words(self, rank: int) -> str:
        lines = (self.folder / f"rank{rank}.err").read_text().splitlines()
        return lines[-1] if lines else "it printed nothing"


def plan_for(scenario: str, *, ranks: int = 4, seconds: float = 12.0, libraries: Path | None = None) -> Plan:
    """The plan of a scenario. In a job of several ranks the victim is not rank 0, so that no result depends on it.

    libraries: folder of real ones; None: emulated. Raises BadInput for an unknown scenario or an impossible number
    of ranks.
    """
    if scenario not in FAULTS:
        raise BadInput(f"no scenario {scenario!r}: choose from {', '.join(FAULTS)}")
    if not (1 if libraries else 2) <= ranks <= 8:
        raise BadInput(f"the demo job cannot have {ranks} ranks: give 2 to 8")
    return Plan(
        libraries=str(libraries or build.build()),
        ranks=ranks,
        seconds=seconds,
        fault=scenario,
        victim=min(2, ranks - 1),
        loader=scenario == "input",
        first_step=0 if scenario == "cold" else Plan.first_step,
    )


@contextmanager
def started(
    plan: Plan, folder: Path | None = None, *, before: Callable[[int], Sequence[str]] = lambda rank: ()
) -> Iterator[Job]:
    """The job's processes at their gate, libraries loaded; all are ended at the end in any case.

    folder: an empty folder for the job's files, truth.json at the end; without it no file is kept.
    before: words that precede the command of a rank, and end by executing it.
    """
    with ExitStack() as stack:
        folder = folder or Path(stack.enter_context(_scratch()))
        plan = replace(plan, answer_port=stack.enter_context(outside.answers(plan)))
        plan.write(folder)
        turns = folder / outside.TURNS_FILE
        turns.write_bytes(bytes(8 * outside.MAX_DEVICES))
        stack.callback(_remove_segments, folder.name)
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        processes.extend(_start_rank(folder, rank, before(rank)) for rank in range(plan.ranks))
        _await_ready(processes, folder)
        job = Job(plan, folder, tuple(processes), threading.Event())
        outside.place(plan, job.pids)
        with outside.disturbing(plan, job.pids, job.has_begun, turns=turns) as intervals_ns:
            yield job
        _write_truth(job, intervals_ns)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory if possible, so that the ranks' clocks are written while a disk is made slow."""
    return tempfile.TemporaryDirectory(prefix="stallscope-demo-", dir=SHARED if SHARED.is_dir() else None)


def _remove_segments(name: str) -> None:
    for left in SHARED.glob(f"emulated-nccl-{name}-*"):
        left.unlink(missing_ok=True)


def _start_rank(folder: Path, rank: int, before: Sequence[str]) -> subprocess.Popen[str]:
    with (folder / f"rank{rank}.err").open("w") as errors:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "stallscope.demo.job", str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ
            | {
                "EMULATED_GPU_TURNS": str(folder / outside.TURNS_FILE),
                "EMULATED_NCCL_NAME": folder.name,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )


def _await_ready(processes: list[subprocess.Popen[str]], folder: Path) -> None:
    for rank, process in enumerate(processes):
        line = process.stdout.readline() if process.stdout else ""
        if line != "ready\n":
            lines = (folder / f"rank{rank}.err").read_text().splitlines()
            raise StallscopeError(
                f"rank {rank} of the demo job did not start: {lines[-1] if lines else line!r}"
            )


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def _write_truth(job: Job, intervals_ns: list[tuple[int, int]]) -> None:
    fault = FAULTS[job.plan.fault]
    truth = {
        "fault": job.plan.fault,
        "cause": fault.cause,
        "culprits": [job.plan.victim] if fault.cause else [],
        "pids": job.pids,
        "period_steps": fault.every_steps if fault.every_steps > 1 else None,
        "disturbed_from_outside_ns": intervals_ns,
    }
    (job.folder / TRUTH_FILE).write_text(json.dumps(truth, indent=1))
