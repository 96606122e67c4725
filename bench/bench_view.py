"""Cost of the page of a running trace: CPU and memory of the process that draws it, and of the agent.

The job is the job of bench_agent.py: 8 ranks, 2,000 collectives a second. The agent runs on a pseudo-terminal of
120 x 40, as on a user's screen. The page must not change the agent's own cost. Needs root, gcc, and the built BPF
programs.
"""

import os
import pty
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import bench_agent
from report import report

WARM_UP_S = 15
MEASURED_S = 20
ATTACH_S = 30.0


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        command = [sys.executable, bench_agent.__file__, str(folder)]
        ranks = [
            stack.enter_context(bench_agent.running([*command, str(number)], folder))
            for number in range(bench_agent.N_RANKS)
        ]
        for process in ranks:
            process.stdout.readline()
        agent, said = stack.enter_context(on_a_terminal(bench_agent.agent_command(folder, ranks)))
        end_s = time.monotonic() + ATTACH_S
        while b"libcudart" not in said or b"libnccl" not in said:
            if time.monotonic() > end_s:
                sys.exit("the agent has not attached")
            time.sleep(0.05)
        for process in ranks:
            process.stdin.write(b"\n")
            process.stdin.flush()
        time.sleep(WARM_UP_S)
        report("view", measured(agent.pid, view_of(agent.pid), said))


def measured(agent: int, view: int, said: bytearray) -> dict[str, float]:
    """CPU and memory of both over MEASURED_S, and the bytes sent to the terminal in that time."""
    begin_s, n_bytes = time.monotonic(), len(said)
    before = bench_agent.process_cpu_s(agent), bench_agent.process_cpu_s(view)
    time.sleep(MEASURED_S)
    elapsed_s = time.monotonic() - begin_s
    after = bench_agent.process_cpu_s(agent), bench_agent.process_cpu_s(view)
    return {
        "collectives_per_s": bench_agent.COLLECTIVES_PER_S,
        "agent_cpu_percent": round(100 * (after[0] - before[0]) / elapsed_s, 2),
        "agent_rss_mb": round(bench_agent.status_kb(agent, "VmRSS") / 1024, 1),
        "view_cpu_percent": round(100 * (after[1] - before[1]) / elapsed_s, 2),
        "view_peak_rss_mb": round(bench_agent.status_kb(view, "VmHWM") / 1024, 1),
        "terminal_bytes_per_s": round((len(said) - n_bytes) / elapsed_s),
        "measured_s": round(elapsed_s, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


@contextmanager
def on_a_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """A process on a pseudo-terminal, and all that it writes; it is killed in the end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    said = bytearray()

    def read() -> None:
        while True:
            try:
                said.extend(os.read(ours, 1 << 16))
            except OSError:
                return

    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()
        thread.join(10)
        os.close(ours)


def view_of(agent: int) -> int:
    """The process that draws, a child of the agent's."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for pid in children:
        if b"stallscope.live.viewer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    sys.exit("nothing draws the page")


if __name__ == "__main__":
    main()
