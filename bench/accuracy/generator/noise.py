"""Scatter of hosts, GPUs and the fabric. The sizes follow the recordings; docs/decisions/second-generator.md."""

import math

import numpy as np

from stallscope.events.names import Category

HOST_SPEED, HOST_WANDER, HOST_MEMORY, HOST_JITTER = 0.07, 0.16, 0.6, 0.11
"""Log scatter of a host: between ranks, from step to step (with its correlation), of one instruction."""
GPU_SPEED, GPU_WANDER, GPU_JITTER = 0.003, 0.004, 0.012
"""The same of a GPU; its wander follows temperature and power."""
FABRIC_JITTER, FABRIC_TAIL = 0.04, 0.004
INTERRUPTION, INTERRUPTION_NS = 0.006, 260_000
"""Share of host instructions that are interrupted, and the median length of the interruption."""
INTERRUPTED_IN = (
    *(Category.ON_CPU,) * 14,
    *(Category.DRIVER,) * 2,
    *(Category.PREEMPTED,) * 2,
    Category.LOCK,
    Category.OTHER_OFF,
)
_DRAWN = 1 << 14


class Noise:
    """Random numbers of a job, drawn in blocks. Every rank has its own host and GPU speed."""

    def __init__(
        self, seed: int, n_processes: int, *, node_of: list[int], gpu_spread: float = GPU_SPEED
    ) -> None:
        """gpu_spread: log scatter of the GPUs of the job, by manufacture."""
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 17]))
        self.scale = float(self.rng.uniform(0.6, 1.4))
        self.host_speed = np.exp(HOST_SPEED * self.rng.standard_normal(n_processes)).tolist()
        self.gpu_speed = np.exp(gpu_spread * self.rng.standard_normal(n_processes)).tolist()
        self._wander = HOST_WANDER * self.rng.standard_normal(n_processes)
        self._warmth = GPU_WANDER * self.rng.standard_normal(n_processes)
        self.node_of = node_of
        self._normals: list[float] = []
        self._uniforms: list[float] = []
        self.host_now: list[float] = []
        self.gpu_now: list[float] = []
        self.next_step(1.0)

    def next_step(self, warm_up: float) -> None:
        """Let the speed of hosts and GPUs drift. warm_up: how many times as long the hosts take in this step."""
        n = len(self._wander)
        fresh = math.sqrt(1 - HOST_MEMORY**2) * HOST_WANDER
        self._wander = HOST_MEMORY * self._wander + fresh * self.rng.standard_normal(n)
        self._warmth = 0.98 * self._warmth + 0.2 * GPU_WANDER * self.rng.standard_normal(n)
        self.host_now = (np.array(self.host_speed) * np.exp(self._wander * self.scale) * warm_up).tolist()
        self.gpu_now = (np.array(self.gpu_speed) * np.exp(self._warmth)).tolist()

    def normal(self) -> float:
        if not self._normals:
            self._normals = self.rng.standard_normal(_DRAWN).tolist()
        return self._normals.pop()

    def uniform(self) -> float:
        if not self._uniforms:
            self._uniforms = self.rng.random(_DRAWN).tolist()
        return self._uniforms.pop()

    def host_ns(self, process: int, ns: float) -> int:
        return int(ns * self.host_now[process] * math.exp(HOST_JITTER * self.scale * self.normal()))

    def gpu_ns(self, process: int, ns: float) -> int:
        return int(ns * self.gpu_now[process] * math.exp(GPU_JITTER * self.normal()))

    def fabric_ns(self, ns: float) -> int:
        tail = 1.0 + 2.0 * self.uniform() if self.uniform() < FABRIC_TAIL else 1.0
        return int(ns * tail * math.exp(FABRIC_JITTER * self.normal()))

    def interruption(self) -> tuple[int, int] | None:
        """Category and length of an interruption, for a few instructions."""
        if self.uniform() >= INTERRUPTION:
            return None
        ns = int(INTERRUPTION_NS * math.exp(0.9 * self.normal()))
        return INTERRUPTED_IN[int(self.uniform() * len(INTERRUPTED_IN))], min(ns, 8_000_000)

    def wake_ns(self) -> int:
        """Time from the end of GPU work to the return of the synchronise call."""
        return int(9_000 * math.exp(0.35 * self.normal()))
