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
        agent, message = stack.enter_context(on_a_terminal(bench_agent.agent_command(folder, ranks)))
        end_s = time.monotonic() + ATTACH_S
        while b"libcudart" not in message or b"libnccl" not in message:
            if time.monotonic() > end_s:
                sys.exit("the agent has not attached")
            time.sleep(0.05)
        for process in ranks:
            process.stdin.write(b"\n")
            process.stdin.flush()
        time.sleep(WARM_UP_S)
        report("view", measured(agent.pid, view_of(agent.pid), message))


def measured(agent: int, view: int, message: bytearray) -> dict[str, float]:
    """CPU and memory of both over MEASURED_S, and the bytes sent to the terminal in that time."""
    begin_s, n_bytes = time.monotonic(), len(message)
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
        "terminal_bytes_per_s": round((len(message) - n_bytes) / elapsed_s),
        "measured_s": round(elapsed_s, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


@contextmanager
def on_a_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """A process on a pseudo-terminal, and all that it writes; it is killed in the end."""
    own_rows, other_rows = pty.openpty()
    termios.tcsetwinsize(other_rows, (40, 120))
    message = bytearray()

    def read() -> None:
        while True:
            try:
                message.extend(os.read(own_rows, 1 << 16))
            except OSError:
                return

    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=other_rows, stdout=other_rows, stderr=other_rows, env=environment
    )
    os.close(other_rows)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield process, message
    finally:
        process.kill()
        process.wait()
        thread.join(10)
        os.close(own_rows)


def view_of(agent: int) -> int:
    """The process that draws, a child of the agent's."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for pid in children:
        if b"stallscope.live.viewer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    sys.exit("nothing draws the page")


if __name__ == "__main__":
    main()
