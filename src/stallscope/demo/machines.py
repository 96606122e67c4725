"""Several machines on one host: network namespaces with separate addresses, and an agent in each.

They share the kernel and so its monotonic clock; each agent gets a separate wall clock. As a
program (`python -m stallscope.demo.machines`) this file is one such agent.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stallscope.demo import build, live_demo
from stallscope.demo.live_demo import Job
from stallscope.demo.plan import Plan, end_with_parent
from stallscope.errors import CannotTrace

_NETWORK = "198.18"  # RFC 2544: for tests, not routed
_OURS = 1
_ATTACH_S = 60.0
_END_S = 20.0


@dataclass(frozen=True)
class Machine:
    """One machine: its name, its address, and the words that run a command in it (and become that command)."""

    name: str
    address: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """The network of the machines. address: of the host, at which they reach a hub."""

    address: str
    machines: tuple[Machine, ...]


@contextmanager
def network(n: int) -> Iterator[Network]:
    """`n` machines on one bridge inside the with block. Raises CannotTrace if namespaces cannot be made."""
    # Random, because another run may do the same now; a device outlives its namespace for some time.
    mark = os.urandom(3)
    subnet = f"{_NETWORK}.{mark[0] % 254 + 1}"
    bridge = f"ss{mark.hex()}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.{_OURS}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        made = []
        for number in range(n):
            space, outer, inner = f"{bridge}-{number}", f"{bridge}o{number}", f"{bridge}i{number}"
            address = f"{subnet}.{number + _OURS + 1}"
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            stack.callback(_ip, "link", "del", outer)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", inner)
            _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            # Not `ip netns exec`, which hides the kernel's file systems from the command.
            words = ("nsenter", f"--net=/run/netns/{space}", "--")
            made.append(Machine(f"machine-{number}", address, words))
        yield Network(f"{subnet}.{_OURS}", tuple(made))


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise CannotTrace(
            f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}; it takes root and iproute2"
        )


@dataclass(frozen=True, kw_only=True)
class AgentPlan:
    """An agent on one of the machines. Its wall clock is ahead by offset_ns and gains drift_ppm."""

    db: str
    node: str
    pids: tuple[int, ...]
    hub: str
    token_file: str
    ca_file: str | None = None
    cluster: str = "machines"
    offset_ns: int = 0
    drift_ppm: float = 0.0


def start_agent(machine: Machine, plan: AgentPlan, output: Path) -> "subprocess.Popen[bytes]":
    """An agent as a process on a machine; its output goes into a file. It never outlives this process."""
    with output.open("w") as out:
        return subprocess.Popen(
            [*machine.words, sys.executable, "-m", __name__, json.dumps(asdict(plan))],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The hub of the agents and their credentials. ca_file: None sends in clear text."""

    hub: str
    token_file: Path
    ca_file: Path | None = None


@contextmanager
def traced_job(
    plan: Plan,
    machines: Sequence[Machine],
    report: Report,
    *,
    folder: Path,
    clocks: Sequence[tuple[int, float]] = (),
) -> Iterator[Job]:
    """A job whose ranks are distributed over the machines, at its gate, with an agent attached on each.

    folder: for the agents' traces and output. clocks: each machine's (offset_ns, drift_ppm).
    Raises CannotTrace when an agent does not attach.
    """
    n_here = -(-plan.ranks // len(machines))
    with ExitStack() as stack:
        job = stack.enter_context(live_demo.started(plan, before=lambda rank: machines[rank // n_here].words))
        running = []
        for number, machine in enumerate(machines):
            offset_ns, drift_ppm = clocks[number] if clocks else (0, 0.0)
            agent = AgentPlan(
                db=str(folder / f"{machine.name}.db"),
                node=machine.name,
                pids=tuple(job.pids[number * n_here : (number + 1) * n_here]),
                hub=report.hub,
                token_file=str(report.token_file),
                ca_file=str(report.ca_file) if report.ca_file else None,
                offset_ns=offset_ns,
                drift_ppm=drift_ppm,
            )
            running.append(start_agent(machine, agent, folder / f"{machine.name}.said"))
            stack.callback(_end, running[-1])
        for machine, process in zip(machines, running, strict=True):
            _await_attached(process, folder / f"{machine.name}.said")
        yield job


def _await_attached(agent: "subprocess.Popen[bytes]", output: Path) -> None:
    end_s = time.monotonic() + _ATTACH_S
    while output.read_text().count("attached to") < len(build.LIBRARIES):
        if agent.poll() is not None or time.monotonic() > end_s:
            raise CannotTrace(f"an agent did not attach: {output.read_text()[-300:]}")
        time.sleep(live_demo.POLL_S)


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """Ends the agent like Ctrl-C; by force if that takes too long."""
    agent.send_signal(signal.SIGINT)
    try:
        agent.wait(_END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def wall_clock(
    offset_ns: int, drift_ppm: float, true_ns: Callable[[], int] = time.time_ns
) -> Callable[[], int]:
    """A wrong wall clock: ahead by offset_ns at first, and by drift_ppm more with time."""
    begin_ns = true_ns()

    def now_ns() -> int:
        at_ns = true_ns()
        return at_ns + offset_ns + round((at_ns - begin_ns) * drift_ppm / 1e6)

    return now_ns


def main(words: Sequence[str]) -> None:
    """Run an agent with these options, until SIGTERM."""
    from stallscope import agent

    end_with_parent()
    options: dict[str, Any] = json.loads(words[0])
    plan = AgentPlan(**options | {"pids": tuple(options["pids"])})
    agent.trace(
        agent.Options(
            db=Path(plan.db),
            node=plan.node,
            pids=plan.pids,
            hub=agent.Hub(
                address=plan.hub,
                token_file=Path(plan.token_file),
                cluster=plan.cluster,
                ca_file=Path(plan.ca_file) if plan.ca_file else None,
                insecure=plan.ca_file is None,
            ),
            wall_ns=wall_clock(plan.offset_ns, plan.drift_ppm),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
