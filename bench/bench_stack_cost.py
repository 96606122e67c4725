"""The cost of an event's stack for the calling thread: events without stacks, and with them.

Calls a function in a loop, each call an event, in turns without hooks and with; the difference of the best batches.
The loop is a program in C, so its stacks are native; a Python walk comes on top (1 us). Needs root, gcc, and the built
BPF programs.
"""

import subprocess
import tempfile
import threading
from pathlib import Path

from bench_hook_cost import built, hooks, measured
from report import report

from stallscope.capture.probes.program import Options, Program
from stallscope.capture.stacks.sampler import Stacks

N_TURNS = 7


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        loop, library = built(Path(folder))
        bare = added_ns(loop, library, with_stacks=False)
        whole = added_ns(loop, library, with_stacks=True)
    report(
        "stack_cost",
        {
            "added_ns_per_event": {"without_stack": bare, "with_native_stack": whole},
            "stack_ns": round(whole - bare, 1),
        },
    )


def added_ns(loop: Path, library: Path, *, with_stacks: bool) -> float:
    """ns that a probe adds to a call if each call is reported as an event."""
    with (
        Program.load(Options(slow_call_ns=0)) as program,
        subprocess.Popen([loop, "cudaFree"], stdin=-1, stdout=-1, text=True) as process,
    ):
        stacks = Stacks(1, lambda _pid, words: len(words), print, program.walk_python, program.peek)
        stacks.register_shape = program.know_native
        if with_stacks:
            stacks.follow([process.pid])
        stop = threading.Event()
        taking = threading.Thread(target=take, args=(program, stacks, stop))
        taking.start()
        turns = [turn(program, library, process) for _ in range(N_TURNS)]
        stop.set()
        taking.join()
        assert process.stdin is not None
        process.stdin.close()
    return round(min(on for _, on in turns) - min(off for off, _ in turns), 1)


def turn(program: Program, library: Path, process: "subprocess.Popen[str]") -> tuple[float, float]:
    """ns per call without hooks, and with."""
    without = measured(process)
    link = program.attach(str(library), hooks(library))
    with_hooks = measured(process)
    program.release(link)
    return without, with_hooks


def take(program: Program, stacks: Stacks, stop: threading.Event) -> None:
    """As the agent does, but more often: the loop makes more events in a second than a job in an hour."""
    while not stop.wait(0.005):
        program.arrivals.drain()
        program.events.drain()
        natives, output = program.natives.drain(), program.stacks.drain()
        stacks.take(natives, output)


if __name__ == "__main__":
    main()
