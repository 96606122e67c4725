"""The agent as a user starts it, with probes that can be detached and attached together, for a comparison in pairs.

    python switching.py trace --db F ...     # "off" or "on" on its standard input: it answers when that is done;
                                             # "governed": prints the state of its governor

The agent keeps running: a restart would take ten seconds, in which a machine drifts by more than the cost of the
probes. While the probes are off the governor's clock stops, so that the budget covers the time with probes. The code
is the agent's own; this file replaces only the program and the governor.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from running import CTRL_C_S, Failed, Program, end, wait_until_said

from stallscope import cli
from stallscope.capture import session
from stallscope.capture.probes import program as kernel_side
from stallscope.capture.probes.governor import Count, Governor, counts_by_group
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.optional_programs import ON_REQUEST, OptionalPrograms
from stallscope.capture.probes.program import Link
from stallscope.events.kernel import HookGroup

ANSWER_S = 20.0
GOVERNED = "governed"
COUNTED = tuple(group for group in HookGroup if group is not HookGroup.GRAPH_LAUNCHES)
"""The groups whose calls the kernel counts."""
_AT_ONCE = 32
"""Links closed side by side: each waits for the kernel, some 30 ms."""


class Switched(kernel_side.Program):
    """A program that remembers its probes."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._lock = threading.RLock()
        self._places: dict[Link, tuple[int, Sequence[Hook], int]] = {}
        self._told: list[str] = []
        self._off_since_ns = 0
        self._off_ns = 0

    def clock_ns(self) -> int:
        """Time with hooks; monotonic as long as they were never off."""
        with self._lock:
            return (self._off_since_ns or time.monotonic_ns()) - self._off_ns

    def attach(self, path: str, hooks: Sequence[Hook], *, pid: int = 0) -> Link:
        """As the program does; while the hooks are off, for later."""
        with self._lock:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            is_off = bool(self._off_since_ns)
            link = Link(self._object) if is_off else super().attach(path, hooks, pid=pid)
            if is_off:
                self._links.append(link)
            self._places[link] = fd, hooks, pid
            return link

    def release(self, link: Link) -> None:
        """As the program does."""
        with self._lock:
            if index := self._places.pop(link, None):
                os.close(index[0])
            super().release(link)

    def detach(self) -> None:
        """As the program does."""
        with self._lock:
            super().detach()

    def switch(self, *, is_on: bool) -> None:
        """All hooks and tracepoints on, or off; returns when they are."""
        with self._lock, ThreadPoolExecutor(_AT_ONCE) as at_once:
            if is_on == (not self._off_since_ns):
                return
            if is_on:
                for name in self._told:
                    self._tracepoints.append(self._object.attach(name))
                list(at_once.map(self._hook_again, self._places))
                self._off_ns += time.monotonic_ns() - self._off_since_ns
                self._off_since_ns = 0
            else:
                begin_ns = time.monotonic_ns()
                closing = [at_once.submit(link.close) for link in self._links]
                closing += [
                    at_once.submit(self._object.detach, tracepoint) for tracepoint in self._tracepoints
                ]
                self._tracepoints = []
                for tracepoint in closing:
                    tracepoint.result()
                self._off_since_ns = (begin_ns + time.monotonic_ns()) // 2  # they went one after another

    def _hook_again(self, link: Link) -> None:
        fd, hooks, pid = self._places[link]
        for part in kernel_side._PARTS:
            if chosen := [hook for hook in hooks if hook.part == part]:
                self._attach_hooks(link, part, f"/proc/self/fd/{fd}", chosen, pid)

    def _start(self, switch: str, optional: OptionalPrograms, pids: frozenset[int] | None) -> None:
        super()._start(switch, optional, pids)
        names = [name for name in optional.programs() if name not in ON_REQUEST]
        self._told = [*names, switch, *kernel_side._TRACEPOINTS]


def main() -> None:
    """Be the agent."""
    _replace("Program", Loading)
    _replace("Governor", governed)
    cli.main()


def _replace(name: str, value: object) -> None:
    """Replace a name that the capture's session uses. Raises AttributeError if it does not use it."""
    getattr(session, name)
    setattr(session, name, value)


class Loading:
    """Stands for the program's class in the agent."""

    @staticmethod
    def load(options: kernel_side.Options) -> Switched:
        """The program, and a thread that switches it."""
        loaded = Switched.load(options)
        threading.Thread(target=_obey, args=(loaded,), daemon=True).start()
        return loaded


class Turn(NamedTuple):
    """The governor turned a group on or off (monotonic ns)."""

    at_ns: int
    group: int
    is_on: bool


class Governed(NamedTuple):
    """The state of a governor and its programs.

    lost_ns: estimated cost of probes for all processes, of each group in COUNTED. on_ns: its clock. programs: runs and
    ns of each program, while the kernel counts them.
    """

    turns: list[Turn]
    lost_ns: list[float]
    on_ns: int
    programs: dict[str, tuple[int, int]]


class Told(Governor):
    """A governor that remembers its turns."""

    last: ClassVar["Told"]

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.turns: list[Turn] = []
        type(self).last = self

    def tells(self) -> dict[str, Any]:
        """What Governed holds, of now."""
        result = counts_by_group(self.program.process_rows(), COUNTED)
        lost_ns = [
            sum(count.lost_ns(Count(), self.cost_ratio) for count in result[group].values())
            for group in COUNTED
        ]
        programs = {name: (cost.n_runs, cost.run_ns) for name, cost in self.program.costs().items()}
        return {"turns": self.turns, "lost_ns": lost_ns, "on_ns": self.clock_ns(), "programs": programs}

    def _set_on(self, group: HookGroup, *, is_on: bool) -> bool:
        is_switched = super()._set_on(group, is_on=is_on)
        if is_switched:
            self.turns.append(Turn(time.monotonic_ns(), group, is_on))
        return is_switched


def governed(program: Switched, budget: float) -> Governor:
    """A governor that uses the clock of the program."""
    return Told(program, budget, clock_ns=program.clock_ns)


def _obey(loaded: Switched) -> None:
    for word in map(str.strip, sys.stdin):
        try:
            if word == GOVERNED:
                word = json.dumps(Told.last.tells())
            else:
                loaded.switch(is_on=word == "on")
        except KernelRefused as refusal:
            word = str(refusal)
        print(word, flush=True)


# The other side


@dataclass
class Agent:
    """An agent that can be switched; its hooks are on at first."""

    program: Program

    def switch(self, *, is_on: bool) -> None:
        """Returns when it is done. Raises Failed."""
        word = "on" if is_on else "off"
        if (answer := self._asked(word)) != word:
            raise Failed(f"the agent did not switch {word}: {answer or self.program.last_words()}")

    def governed(self) -> "Governed":
        """The present state of its governor. Raises Failed."""
        data = json.loads(self._asked(GOVERNED) or "null")
        if data is None:
            raise Failed(f"the agent did not answer: {self.program.last_words()}")
        programs = {name: (n_runs, run_ns) for name, (n_runs, run_ns) in data["programs"].items()}
        return Governed([Turn(*turn) for turn in data["turns"]], data["lost_ns"], data["on_ns"], programs)

    def _asked(self, word: str) -> str:
        process = self.program.process
        if process.stdin is None or process.stdout is None:
            raise Failed("the agent has no pipes")
        with suppress(BrokenPipeError):
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
        answers, _, _ = select.select([process.stdout], [], [], ANSWER_S)
        return process.stdout.readline().decode().strip() if answers else ""


@contextmanager
def switched(db: Path, *, words: Sequence[str] = ()) -> Iterator[Agent]:
    """The agent, attached; ended as by Ctrl-C. Raises Failed."""
    path = db.with_suffix(".log")
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, "trace", "--db", str(db), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
        )
    program = Program(process, path)
    try:
        wait_until_said(program)
        yield Agent(program)
        process.terminate()
        process.wait(CTRL_C_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"the agent did not end: {program.last_words()}") from None
    finally:
        end(program)


if __name__ == "__main__":
    main()
