"""The metrics of a node: one table, from which OTLP, Prometheus and the documentation follow.

Names and units follow OpenTelemetry's semantic conventions (hw.*, system.*, semconv 1.41) where they
exist; gpu.cuda.*, nccl.* and stallscope.* are stallscope's. Units are UCUM.
"""

from enum import StrEnum
from typing import NamedTuple

from stallscope.events.owner import GROUP_LABELS, otel_attribute


class Kind(StrEnum):
    """The meaning of a number, and its type in OTLP: monotonic sum, sum, gauge, histogram."""

    COUNTER = "counter"
    UP_DOWN = "up-down counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One entry. attributes: names, in order. bounds: upper edges of a histogram's buckets, in its unit."""

    name: str
    kind: Kind
    unit: str
    attributes: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name according to Prometheus' rules: underscores, the unit in words, `_total` for counters."""
        words = self.name.replace(".", "_")
        unit = PROMETHEUS_UNITS.get(self.unit, "")
        if unit and not words.endswith(f"_{unit}"):
            words += f"_{unit}"
        return words + "_total" if self.kind is Kind.COUNTER else words


PROMETHEUS_UNITS = {
    "s": "seconds",
    "By": "bytes",
    "1": "ratio",
    "Cel": "celsius",
    "W": "watts",
    "Hz": "hertz",
}
"""Words for units; a unit in braces is an annotation and has no word."""

SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TOKEN_SECONDS = (*(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0))
BYTES = tuple(float(4**n) for n in range(3, 17))

COLLECTIVE_CALLS = Metric(
    "nccl.collective.calls",
    Kind.COUNTER,
    "{call}",
    ("nccl.rank", "nccl.operation"),
    "collectives entered",
)
COLLECTIVE_SIZE = Metric(
    "nccl.collective.size",
    Kind.HISTOGRAM,
    "By",
    ("nccl.operation",),
    "bytes of each collective",
    BYTES,
)
COLLECTIVE_WAIT = Metric(
    "nccl.collective.wait.duration",
    Kind.HISTOGRAM,
    "s",
    ("nccl.rank",),
    "duration of each wait for the GPU with a collective enqueued: a rank that waits less than its peers "
    "makes them wait",
    SECONDS,
)
COLLECTIVE_LATENESS = Metric(
    "nccl.collective.lateness",
    Kind.HISTOGRAM,
    "s",
    ("nccl.rank",),
    "delay of each rank's entry into a round after the first rank of this node",
    SECONDS,
)
CUDA_CALLS = Metric(
    "gpu.cuda.calls",
    Kind.COUNTER,
    "{call}",
    ("nccl.rank", "gpu.cuda.class"),
    "CUDA calls by class; launches only while launch counting is on",
)
CUDA_SLOW_CALL = Metric(
    "gpu.cuda.slow_call.duration",
    Kind.HISTOGRAM,
    "s",
    ("nccl.rank", "gpu.cuda.class"),
    "duration of the slow calls, which get individual records",
    SECONDS,
)
CUDA_CALL = Metric(
    "gpu.cuda.call.duration",
    Kind.HISTOGRAM,
    "s",
    ("nccl.rank", "gpu.cuda.class"),
    "duration of the timed calls: all calls, or the calls made while the probes were on",
    (1e-6, 3e-6, *SECONDS),
)
CUDA_ERRORS = Metric(
    "gpu.cuda.errors",
    Kind.COUNTER,
    "{call}",
    ("nccl.rank", "gpu.cuda.class"),
    "CUDA calls that returned an error",
)
DRIVER_CALL = Metric(
    "gpu.driver.ioctl.duration",
    Kind.HISTOGRAM,
    "s",
    ("nccl.rank",),
    "duration of calls into the GPU's driver (with --gpu-ioctls), also those made inside CUDA calls",
    (1e-6, 3e-6, *SECONDS),
)
DRIVER_ERRORS = Metric(
    "gpu.driver.ioctl.errors",
    Kind.COUNTER,
    "{call}",
    ("nccl.rank",),
    "calls into the GPU's driver that the kernel refused (with --gpu-ioctls)",
)
CUDA_COPIED = Metric(
    "gpu.cuda.copied",
    Kind.COUNTER,
    "By",
    ("nccl.rank", "gpu.cuda.direction"),
    "bytes requested by copies, by direction",
)
CUDA_MEMORY = Metric(
    "gpu.cuda.memory.usage",
    Kind.UP_DOWN,
    "By",
    ("nccl.rank", "gpu.cuda.device", "gpu.cuda.memory.kind"),
    "memory that the process allocated and did not free while it was traced",
)
LEDGER_TIME = Metric(
    "gpu.process.time",
    Kind.COUNTER,
    "s",
    ("nccl.rank", "stallscope.category"),
    "time that the GPU threads of the process spent in each category of the time ledger",
)
_SERVED = ("stallscope.engine", "gen_ai.request.model", "url.path")
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    _SERVED,
    "time from the arrival of a request at an inference engine until its first token, or first byte",
    TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    _SERVED,
    "time between two tokens of a response, at most 9 % too large",
    TOKEN_SECONDS,
)
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    _SERVED,
    "time from the arrival of a request until the end of its response",
    TOKEN_SECONDS,
)
PROCESSES = Metric("stallscope.processes", Kind.UP_DOWN, "{process}", (), "GPU processes traced now")
RECORDS = Metric("stallscope.records", Kind.COUNTER, "{record}", ("stallscope.table",), "records kept")
LOST = Metric(
    "stallscope.records.lost", Kind.COUNTER, "{record}", ("stallscope.loss",), "records lost, by kind"
)
INCIDENTS = Metric(
    "stallscope.incidents",
    Kind.COUNTER,
    "{incident}",
    ("stallscope.verdict.kind", "stallscope.cause"),
    "incidents opened",
)
INCIDENTS_OPEN = Metric(
    "stallscope.incidents.open",
    Kind.UP_DOWN,
    "{incident}",
    ("stallscope.verdict.kind", "stallscope.cause"),
    "incidents open now",
)

OWNER = Metric(
    "stallscope.owner.info",
    Kind.GAUGE,
    "{process}",
    ("process.pid", "nccl.rank", *map(otel_attribute, GROUP_LABELS)),
    "1 for each traced process with a known owner; joined with other metrics by rank or process",
)

CPU_TIME = Metric("system.cpu.time", Kind.COUNTER, "s", ("cpu.mode",), "CPU time of the machine, by mode")
MEMORY_USAGE = Metric(
    "system.memory.usage", Kind.UP_DOWN, "By", ("system.memory.state",), "memory of the machine, by state"
)
MEMORY_LIMIT = Metric("system.memory.limit", Kind.UP_DOWN, "By", (), "total memory of the machine")
DISK_IO = Metric(
    "system.disk.io", Kind.COUNTER, "By", ("system.device", "disk.io.direction"), "bytes read and written"
)
NETWORK_IO = Metric(
    "system.network.io",
    Kind.COUNTER,
    "By",
    ("network.interface.name", "network.io.direction"),
    "bytes received and sent",
)
_GPU = ("hw.id", "hw.name", "hw.vendor")
GPU_UTILIZATION = Metric(
    "hw.gpu.utilization", Kind.GAUGE, "1", _GPU, "share of the last second in which a kernel ran on the GPU"
)
GPU_MEMORY_USAGE = Metric("hw.gpu.memory.usage", Kind.UP_DOWN, "By", _GPU, "GPU memory in use")
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", Kind.UP_DOWN, "By", _GPU, "total GPU memory")
TEMPERATURE = Metric("hw.temperature", Kind.GAUGE, "Cel", (*_GPU, "hw.type"), "temperature of the GPU")
POWER = Metric("hw.power", Kind.GAUGE, "W", (*_GPU, "hw.type"), "power the GPU draws")
GPU_CLOCK = Metric("gpu.clock.frequency", Kind.GAUGE, "Hz", _GPU, "clock of the streaming multiprocessors")
GPU_THROTTLED = Metric(
    "gpu.clock.throttled",
    Kind.GAUGE,
    "1",
    (*_GPU, "gpu.clock.throttle_reason"),
    "1 while the clock is held down for this reason",
)
GPU_ERRORS = Metric(
    "hw.errors",
    Kind.COUNTER,
    "{error}",
    (*_GPU, "error.type"),
    "errors of the GPU's memory and NVLinks since the driver was loaded",
)

NODE_SCORE = Metric(
    "stallscope.node.health",
    Kind.GAUGE,
    "1",
    (),
    "the machine's lowest signal as a share of the median of the job's machines, at most 1 (docs/node-health.md)",
)
NODE_SIGNAL = Metric(
    "stallscope.node.signal",
    Kind.GAUGE,
    "",
    ("stallscope.signal",),
    "signals of the machine's health: throughput (1/s), compute, memory, cpu",
)
NODE_STATE = Metric(
    "stallscope.node.state",
    Kind.GAUGE,
    "",
    ("stallscope.state",),
    "1 for the machine's state among the machines of its job: unknown, healthy, suspect, straggler",
)

METRICS = (
    COLLECTIVE_CALLS,
    COLLECTIVE_SIZE,
    COLLECTIVE_WAIT,
    COLLECTIVE_LATENESS,
    CUDA_CALLS,
    CUDA_SLOW_CALL,
    CUDA_CALL,
    CUDA_ERRORS,
    DRIVER_CALL,
    DRIVER_ERRORS,
    CUDA_COPIED,
    CUDA_MEMORY,
    LEDGER_TIME,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    PROCESSES,
    RECORDS,
    LOST,
    INCIDENTS,
    INCIDENTS_OPEN,
    OWNER,
    NODE_SCORE,
    NODE_SIGNAL,
    NODE_STATE,
    CPU_TIME,
    MEMORY_USAGE,
    MEMORY_LIMIT,
    DISK_IO,
    NETWORK_IO,
    GPU_UTILIZATION,
    GPU_MEMORY_USAGE,
    GPU_MEMORY_LIMIT,
    TEMPERATURE,
    POWER,
    GPU_CLOCK,
    GPU_THROTTLED,
    GPU_ERRORS,
)
