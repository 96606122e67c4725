"""Emulated machines of one job in simulated time: their captured rows, an agent's health on each, and one hub.

All ranks work, enter eight collectives, and wait for the slowest machine. A machine differs from the others by its own
constant speed, noise, pauses of its own, and an optional fault.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import N_CATEGORIES, Category, Op
from stallscope.exporters.node_health import ATTEMPTS
from stallscope.health.cohorts import Cohorts
from stallscope.health.node_state import NodeState
from stallscope.health.windows import Windows

S = 10**9
STEP_S = 1.0
N_COLLECTIVES = 8
RANKS_A_NODE = 2
COMM = 0xABCDEF0123456789
WORK_S = 0.3
"""Own time of a healthy rank in a step; it waits for the rest."""


@dataclass
class Fault:
    """The deviations of a machine at a time: multiple of own time, share of preempted time, GPU clock, free memory."""

    slowness: Callable[[float], float] = lambda at_s: 1.0
    preempted: float = 0.0
    clock: float = 1.0
    available: float = 0.5


@dataclass
class Jitter:
    """The differences of healthy machines. pause_every_s: mean time between pauses of one machine, 0: none.

    lost: share of the attempts to report that do not reach the hub.
    """

    speed: float = 0.0
    noise: float = 0.0
    pause_every_s: float = 0.0
    longest_pause_s: float = 6.0
    lost: float = 0.0
    changes_phase: bool = False


@dataclass
class Machine:
    """An emulated machine: its counters, and the health of its agent."""

    name: str
    fault: Fault
    folder: Path
    speed: float
    ledger: Array = field(default_factory=lambda: np.zeros(N_CATEGORIES, np.int64))
    noise: float = 0.0
    state: NodeState = field(default_factory=NodeState)
    signals: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        available_kib = round(self.fault.available * 1_000_000)
        (self.folder / "meminfo").write_text(f"MemTotal: 1000000 kB\nMemAvailable: {available_kib} kB\n")
        self.windows = Windows(proc=self.folder)


@dataclass
class Job:
    """The machines, the hub and the time. run() yields once a second of simulated time."""

    folder: Path
    n_nodes: int = 16
    seed: int = 0
    jitter: Jitter = field(default_factory=Jitter)
    faults: dict[int, Fault] = field(default_factory=dict)
    at_s: float = 0.0
    step_end_s: float = 0.0

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)
        self.hub = Cohorts(clock_s=lambda: self.at_s, wall_s=lambda: self.at_s)
        self.machines = [
            Machine(
                f"n{number}",
                self.faults.get(number, Fault()),
                self.folder / f"n{number}",
                1 + self.draw.uniform(-1, 1) * self.jitter.speed,
            )
            for number in range(self.n_nodes)
        ]

    def run(self, seconds: float) -> Iterator[float]:
        end_s = self.at_s + seconds
        while self.at_s < end_s:
            own_s = [self._own_s(machine) for machine in self.machines]
            step_end_s = self.step_end_s + max(STEP_S, *own_s)
            while self.at_s + 1 <= step_end_s:
                self.at_s += 1
                for machine in self.machines:
                    self._second(machine)
                yield self.at_s
            for machine, own in zip(self.machines, own_s, strict=True):
                machine.windows.take(layout.COLLECTIVES, self._rows(machine, own, step_end_s))
                machine.windows.take(layout.GPUS, _gpu(machine, self.draw))
            self.step_end_s = step_end_s

    def _own_s(self, machine: Machine) -> float:
        """Own time of the machine's ranks in the next step."""
        jitter = self.jitter
        phase = 1.5 if jitter.changes_phase and int(self.at_s / 1200) % 2 else 1.0
        machine.noise = 0.8 * machine.noise + 0.6 * self.draw.normal(0, jitter.noise)
        slowness = machine.fault.slowness(self.at_s)
        own_s = WORK_S * phase * machine.speed * slowness * max(0.5, 1 + machine.noise)
        if jitter.pause_every_s and self.draw.random() < STEP_S / jitter.pause_every_s:
            own_s += self.draw.uniform(0.5, jitter.longest_pause_s)
        return float(own_s)

    def _rows(self, machine: Machine, own_s: float, step_end_s: float) -> Array:
        """The arrivals of a step, and the time ledgers at them."""
        rows = np.zeros(RANKS_A_NODE * N_COLLECTIVES, layout.dtype(layout.COLLECTIVES))
        rows["comm_hash"], rows["nranks"], rows["op"] = COMM, self.n_nodes * RANKS_A_NODE, Op.ALL_REDUCE
        own_ns, step_ns = round(own_s * S), round((step_end_s - self.step_end_s) * S)
        preempted_ns = round(own_ns * (machine.fault.preempted + abs(self.draw.normal(0, 0.01))))
        machine.ledger[Category.PREEMPTED - 1] += preempted_ns
        machine.ledger[Category.ON_CPU - 1] += own_ns - preempted_ns
        machine.ledger[Category.WAIT_GPU - 1] += step_ns - own_ns
        rows["pid"] = np.repeat(np.arange(RANKS_A_NODE) + 100, N_COLLECTIVES)
        rows["ts_ns"], rows["ledger_ns"] = round(step_end_s * S), machine.ledger
        return rows

    def _second(self, machine: Machine) -> None:
        """The agent's loop: report a window that has ended."""
        window = machine.windows.window(round(self.at_s * S) + 1)
        if window is None:
            return
        machine.signals.append(window.signals)
        answer = None
        if self.draw.random() >= self.jitter.lost**ATTEMPTS:
            report = {
                "node": machine.name,
                "cluster": "c1",
                "cohort": window.cohort,
                "signals": window.signals,
                "state": machine.state.state,
                "score": machine.state.score,
                "reason": machine.state.reason,
            }
            answer = self.hub.report(json.dumps(report).encode(), "a")
        machine.state.update(window.signals, answer)


def _gpu(machine: Machine, draw: np.random.Generator) -> Array:
    row = np.zeros(1, layout.dtype(layout.GPUS))
    row["mig"], row["utilization_percent"] = UNKNOWN, 90
    row["sm_max_mhz"], row["sm_mhz"] = 1980, round(1980 * machine.fault.clock * draw.uniform(0.95, 0.99))
    return row
