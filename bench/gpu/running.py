"""Starts and ends the programs of the proof: a job, the agent as a user starts it, and `explain` afterwards.

Every program has a time limit, and no program outlives its with block.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
STALLSCOPE = (sys.executable, "-c", "from stallscope.cli import main; main()")
LOADED_S = 60
READY_S = 45
START_S = 60
"""The agent loads its programs into the kernel: 1.5 s of CPU time, many times longer on a busy machine."""

ATTACH_S = 12
CTRL_C_S = 25
EXPLAIN_S = 90
MPS_S = 15
POLL_S = 0.02
TRACES = "tracing into"
ATTACHED = r"attached to \d+ functions of \S*nccl"


class Failed(Exception):
    """A part of a run failed; the message names the part and its last output."""


@dataclass(frozen=True)
class Program:
    """A started program and the file with its output."""

    process: "subprocess.Popen[bytes]"
    said: Path

    def last_words(self, n_lines: int = 3) -> str:
        """The last lines of its output."""
        lines = [line for line in self.said.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-n_lines:])[-600:] or "no output"


@dataclass(frozen=True)
class Job:
    """A training job: its folder holds the ranks' clocks and truth.json (see job.py)."""

    folder: Path
    launcher: Program
    n_ranks: int

    def await_loaded(self) -> None:
        """Until all ranks have loaded their libraries. Raises Failed."""
        self._await("loaded", LOADED_S)

    def go(self) -> None:
        """Opens the gate."""
        (self.folder / "go").touch()

    def await_ready(self) -> None:
        """Until all ranks are warm. Raises Failed."""
        self._await("ready", READY_S)

    def stop(self) -> None:
        """Asks the ranks to end."""
        (self.folder / "stop").touch()

    def await_end(self, timeout_s: float) -> None:
        """Raises Failed when it does not end, or ends badly."""
        try:
            code = self.launcher.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"the job did not end in {timeout_s:.0f} s: {self.launcher.last_words()}") from None
        if code:
            raise Failed(f"the job ended with code {code}: {self.launcher.last_words()}")

    def _await(self, mark: str, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not all((self.folder / f"{mark}{rank}").exists() for rank in range(self.n_ranks)):
            if self.launcher.process.poll() is not None:
                raise Failed(f"the job ended before it was {mark}: {self.launcher.last_words()}")
            if time.monotonic() > end_s:
                raise Failed(f"the job was not {mark} in {timeout_s:.0f} s: {self.launcher.last_words()}")
            time.sleep(POLL_S)


@contextmanager
def sharing_gpus(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of processes whose kernels run side by side on a GPU, by CUDA's Multi-Process Service.

    Without it a GPU runs the kernels of one process at a time. Raises Failed.
    """
    environment = {
        f"CUDA_MPS_{name}_DIRECTORY": str(folder / f"mps-{name.lower()}") for name in ("PIPE", "LOG")
    }
    for path in environment.values():
        Path(path).mkdir()
    command, environ = "nvidia-cuda-mps-control", os.environ | environment
    try:
        subprocess.run([command, "-d"], env=environ, check=True, capture_output=True, timeout=MPS_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"GPUs cannot be shared: {error}") from None
    try:
        yield environment
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([command], input=b"quit -t 1\n", env=environ, capture_output=True, timeout=MPS_S)


def start_job(
    script: str,
    folder: Path,
    *,
    n_ranks: int,
    words: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """Starts a job, which waits at its gate. To be ended with end(). environment: additional variables."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE / script), "--folder", str(folder), "--gate", "--ranks", str(n_ranks)]
    return Job(folder, start([*command, *words], folder / "job.log", environment), n_ranks)


def start(
    command: Sequence[str], path: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Program:
    with path.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | environment,
        )
    return Program(process, path)


def end(program: Program) -> None:
    """Kills a program and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(program.process.pid, signal.SIGKILL)
    program.process.wait()


@contextmanager
def tracing(db: Path, *, words: Sequence[str] = (), awaits: str = ATTACHED) -> Iterator[Program]:
    """The agent, tracing into db; ended as by Ctrl-C.

    awaits: the output to wait for, by default that NCCL is attached, which a process must have loaded. Raises Failed.
    """
    agent = start([*STALLSCOPE, "trace", "--db", str(db), *words], db.with_suffix(".log"))
    try:
        wait_until_said(agent, awaits)
        yield agent
        if agent.process.poll() is not None:
            raise Failed(f"the agent ended by itself: {agent.last_words()}")
        agent.process.send_signal(signal.SIGINT)
        try:
            code = agent.process.wait(CTRL_C_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"the agent did not end {CTRL_C_S} s after Ctrl-C: {agent.last_words()}") from None
        if code:
            raise Failed(f"the agent ended with code {code}: {agent.last_words()}")
    finally:
        end(agent)


def wait_until_said(agent: Program, awaited: str = ATTACHED) -> None:
    """Until the agent traces, and then for a while until it prints the expected text. Raises Failed.

    Goes on without: NCCL may be linked into a library of another name.
    """
    if not _prints(agent, TRACES, START_S):
        raise Failed(f"the agent did not trace in {START_S} s: {agent.last_words()}")
    _prints(agent, awaited, ATTACH_S)


def _prints(agent: Program, awaited: str, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not re.search(awaited, agent.said.read_text(errors="replace")):
        if agent.process.poll() is not None:
            raise Failed(f"the agent did not start: {agent.last_words()}")
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def explained(db: Path) -> dict[str, Any]:
    """The report on a trace, as the command line gives it. Raises Failed."""
    command = [*STALLSCOPE, "explain", "--db", str(db), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPLAIN_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"explain took more than {EXPLAIN_S} s") from None
    if done.returncode not in (0, 20, 21):  # healthy, found, inconclusive
        raise Failed(f"explain ended with code {done.returncode}: {done.stderr.strip()[-600:]}")
    return dict(json.loads(done.stdout))
