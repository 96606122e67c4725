"""The record types, field by field. The SQL tables and the wire format are derived from them.

Times are int64 ns on the node's CLOCK_MONOTONIC; -1 means unknown for times, ranks and counts that can be
unknown, and becomes NULL in SQL. bpf/events.h has the same fields for the kernel's records; the loader
compares both through BTF before the first record is read.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.events.names import N_CATEGORIES
from stallscope.events.owner import OWNER_LABELS, column

Array = NDArray[Any]

UNKNOWN = -1

SQLITE_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x57A11
"""Marks a SQLite file as a node trace (PRAGMA application_id)."""


class Field(NamedTuple):
    """One column: its name contains the unit, `meaning` is its documentation."""

    name: str
    format: str
    meaning: str
    may_be_unknown: bool = False


class Table(NamedTuple):
    """One record type; its numpy dtype is `dtype(table)`."""

    name: str
    meaning: str
    fields: tuple[Field, ...]


_PROCESS_FIELDS = (
    Field("node", "u4", "number of the event's node; its name is in `nodes`"),
    Field("pid", "u4", "process (the kernel's tgid)"),
)
_LEDGER = Field(
    "ledger_ns",
    f"({N_CATEGORIES},)i8",
    "ns the process has spent in each category since it was first seen (running sums)",
)

COLLECTIVES = Table(
    "collectives",
    "A rank enters a collective: one row per arrival.",
    (
        Field("ts_ns", "i8", "arrival on the host (grouped calls: arrival at ncclGroupEnd)"),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "thread that made the call"),
        Field(
            "comm_hash",
            "u8",
            "communicator: hash of its 128-byte unique id; of parent, split, colour for a split",
        ),
        Field(
            "comm_handle",
            "u8",
            "its address in the process: the only known identity if it is older than the capture",
        ),
        Field("comm_rank", "i4", "rank in the communicator", True),
        Field("nranks", "i4", "ranks in the communicator", True),
        Field(
            "seq",
            "i8",
            "round: n-th collective on the communicator; per (source, destination) for send, recv",
            True,
        ),
        Field("op", "u2", "operation, names.Op"),
        Field("datatype", "u1", "names.Datatype"),
        Field("reduce_op", "u1", "ncclRedOp_t + 1; 0 none"),
        Field("flags", "u4", "names.CollectiveFlag"),
        Field(
            "peer_rank",
            "i4",
            "the peer of send, recv; the root of broadcast, reduce, gather, scatter",
            True,
        ),
        Field("device", "i4", "CUDA device", True),
        Field("count", "i8", "elements", True),
        Field("count_bytes", "i8", "elements x size of the datatype", True),
        Field("stream", "u8", "CUDA stream handle; 0 default or unknown"),
        Field("gpu_start_ns", "i8", "start of its kernel on the GPU (gpu_arrival), on the GPU's clock", True),
        Field("gpu_end_ns", "i8", "end of its kernel on the GPU, on the GPU's clock", True),
        Field("wait_enter_ns", "i8", "start of the process's last finished wait before this arrival", True),
        Field("wait_leave_ns", "i8", "end of that wait: the moment the rank was released", True),
        Field("n_syncs", "u4", "synchronise calls of the process so far"),
        Field("n_allocs", "u4", "allocation and free calls so far"),
        Field("n_copies", "u4", "copies so far"),
        Field("n_launches", "u4", "launches so far; 0 when launches are not counted"),
        _LEDGER,
    ),
)

CALLS = Table(
    "calls",
    "A CUDA or NCCL call that is slow, failed or still open.",
    (
        Field("ts_ns", "i8", "entry"),
        Field("duration_ns", "i8", "time until it returned; unknown while it is open", True),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "thread that made the call"),
        Field("op", "u2", "class of the call, names.Op"),
        Field("symbol", "u2", "exported function; its name is in `symbols`"),
        Field("result", "i4", "CUDA or NCCL result code; 0 success", True),
        Field("count_bytes", "i8", "bytes allocated or copied", True),
        Field("stream", "u8", "CUDA stream handle; 0 default or unknown"),
        Field("device", "i4", "CUDA device", True),
        Field("stack", "i8", "row in `stacks`", True),
    ),
)

OFFCPU = Table(
    "offcpu",
    "An interval of a GPU thread off the CPU, if it is long.",
    (
        Field("ts_ns", "i8", "the thread left the CPU"),
        Field("duration_ns", "i8", "until it ran again; unknown while it has not", True),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "the thread"),
        Field("category", "u1", "names.Category"),
        Field("flags", "u1", "names.OffCpuFlag"),
        Field("syscall_nr", "i4", "system call it was blocked in (numbers of this architecture)", True),
        Field("waker_pid", "i4", "process that woke it", True),
        Field("waker_tid", "i4", "thread that woke it", True),
        Field("runnable_ns", "i8", "of the duration: runnable and not running", True),
        Field("by_pid", "i4", "process that got the CPU", True),
        Field("by_comm", "S16", "its name"),
        Field("stack", "i8", "row in `stacks`", True),
    ),
)

SNAPSHOTS = Table(
    "snapshots",
    "State of a traced process between arrivals, about once a second and at the end.",
    (
        Field("ts_ns", "i8", "when"),
        *_PROCESS_FIELDS,
        Field("alive", "u1", "1 while the process runs; 0 once it has ended"),
        Field("category", "u1", "present state of its most active GPU thread, names.Category"),
        Field("syscall_nr", "i4", "system call that thread is blocked in", True),
        Field("n_collectives", "i8", "collectives enqueued so far", True),
        Field("n_completed", "i8", "collectives completed so far", True),
        Field("in_call", "u2", "operation the thread is inside, names.Op"),
        Field("in_call_since_ns", "i8", "start of that operation", True),
        Field(
            "estimated_ns",
            "i8",
            "of the ledger: waits for the GPU while the probes on synchronise calls were off (running sum)",
        ),
        _LEDGER,
    ),
)

COMMUNICATORS = Table(
    "communicators",
    "A process's membership in a communicator.",
    (
        Field("ts_ns", "i8", "created"),
        Field("ended_ns", "i8", "destroyed or aborted", True),
        *_PROCESS_FIELDS,
        Field("comm_hash", "u8", "the communicator"),
        Field("comm_rank", "i4", "rank of the process in it", True),
        Field("nranks", "i4", "its size", True),
        Field("parent_hash", "u8", "the communicator it was split from; 0 none"),
        Field("last_entered", "i8", "seq of the last collective it entered, where the source counts", True),
        Field(
            "last_completed",
            "i8",
            "seq of the last collective it saw complete, where the source counts",
            True,
        ),
    ),
)

PROCESSES = Table(
    "processes",
    "A traced process.",
    (
        Field("ts_ns", "i8", "first seen"),
        Field("ended_ns", "i8", "exited", True),
        *_PROCESS_FIELDS,
        Field("rank", "i4", "rank in the job", True),
        Field("local_rank", "i4", "rank on the node", True),
        Field("nranks", "i4", "ranks in the job", True),
        Field("device", "i4", "CUDA device", True),
        Field("comm", "S16", "command name"),
        Field("libraries", "S64", "communication libraries that it has loaded, such as `nccl, mpich, ucx`"),
    ),
)

SPANS = Table(
    "spans",
    "Device or host work of a known kind and length, reported by the source (profiler, importer).",
    (
        Field("ts_ns", "i8", "start"),
        Field("duration_ns", "i8", "length"),
        *_PROCESS_FIELDS,
        Field("op", "u2", "names.Op"),
        Field("step", "i8", "training step", True),
        Field("label", "S32", "the source's name for it"),
    ),
)

ANNOTATIONS = Table(
    "annotations",
    "A label that the job set: it is valid until the next label of its kind from the same process.",
    (
        Field("ts_ns", "i8", "start of its validity"),
        *_PROCESS_FIELDS,
        Field("label", "S32", "its kind: step, epoch, phase, container, or a word chosen by the job"),
        Field("value", "S128", "its value"),
    ),
)
"""An addition to TABLES: not captured, and not sent."""

OWNERS = Table(
    "owners",
    "The owner of a process: a row at its start, and a row after each change; the last row is valid.",
    (
        Field("ts_ns", "i8", "time at which these values became known"),
        *_PROCESS_FIELDS,
        *(Field(column(label), "S128", meaning) for label, meaning in OWNER_LABELS.items()),
    ),
)

IDLE_GPUS = Table(
    "idle_gpus",
    "A GPU that a job holds without using it: a row at the start, every minute, and at the end.",
    (
        Field("ts_ns", "i8", "time of observation"),
        _PROCESS_FIELDS[0],
        Field("pid", "u4", "process that holds the GPU; 0 none"),
        Field("gpu", "S64", "the GPU, as the scheduler names it; empty where unknown"),
        Field("holder", "S160", "holder: kind and number, such as `job 4711`"),
        Field("since_ns", "i8", "start of the idle time"),
        Field("is_idle", "u1", "1 idle; 0 used again, or given back"),
        Field("reason", "S32", "why it counts as idle"),
        *(Field(column(label), "S128", meaning) for label, meaning in OWNER_LABELS.items()),
    ),
)

OPERATIONS = Table(
    "operations",
    "Number and duration of the calls of a function: one row per process, function and second.",
    (
        Field("ts_ns", "i8", "end of the interval of the row"),
        Field(
            "interval_ns",
            "i8",
            "its length: a second, or longer if the probes are on for a part of the time",
        ),
        *_PROCESS_FIELDS,
        Field("op", "u2", "class of the call, names.Op"),
        Field("symbol", "u2", "exported function; its name is in `symbols`"),
        Field("direction", "u1", "of a copy, names.Direction"),
        Field("host_memory", "u1", "of a copy from or to the host, names.HostMemory"),
        Field("n", "i8", "calls in the interval; scaled up if is_estimate is 1"),
        Field("n_seen", "i8", "calls that were counted individually"),
        Field("n_failed", "i8", "of n_seen: calls that returned an error"),
        Field("total_ns", "i8", "time inside them; scaled up if is_estimate is 1"),
        Field("max_ns", "i8", "the longest so far in this process, without its first call"),
        Field("first_ns", "i8", "duration of the process's first call, in the row that holds it", True),
        Field("count_bytes", "i8", "bytes copied, set or requested; scaled up if is_estimate is 1"),
        Field("is_estimate", "u1", "1: the probes were on for a part of the interval only"),
        Field(
            "histogram",
            "S640",
            'n_seen by duration: {"upper edge in ns": calls}, each edge twice the previous edge',
        ),
    ),
)

MEMORY = Table(
    "memory",
    "Memory held by a process: one row per process, device and kind of memory, for each second with a change.",
    (
        Field("ts_ns", "i8", "when"),
        *_PROCESS_FIELDS,
        Field("device", "i4", "CUDA device that was current at the allocation", True),
        Field("kind", "u1", "names.MemoryKind"),
        Field("live_bytes", "i8", "bytes allocated during the capture and not freed"),
        Field("n_live", "i8", "number of these allocations"),
        Field("peak_bytes", "i8", "maximum of live_bytes so far"),
        Field("n_allocs", "i8", "allocations so far"),
        Field("allocated_bytes", "i8", "their bytes"),
        Field("n_frees", "i8", "frees of memory that was allocated during the capture"),
        Field("n_unknown_frees", "i8", "frees of memory that was allocated before the capture"),
    ),
)

CALL_ARGUMENTS = Table(
    "call_arguments",
    "Further arguments of a call in `calls`: same ts_ns, pid and tid.",
    (
        Field("ts_ns", "i8", "entry of the call"),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "thread that made the call"),
        Field("direction", "u1", "of a copy, names.Direction"),
        Field("host_memory", "u1", "of a copy from or to the host, names.HostMemory"),
        Field("memory", "u1", "of an allocation or free, names.MemoryKind"),
        Field("address", "u8", "of the memory allocated, freed or copied to; 0 none"),
        Field("handle", "u8", "kernel, graph, event or module that the call is about; 0 none"),
        *(
            Field(f"{dimension}_{axis}", "u4", f"{dimension} of a launch")
            for dimension in ("grid", "block")
            for axis in "xyz"
        ),
    ),
)

HOST_EVENTS = Table(
    "host_events",
    "An event of the machine that affected a traced process or its descendant: disks, memory, signals, quotas, ends.",
    (
        Field("ts_ns", "i8", "start"),
        Field("duration_ns", "i8", "duration; for kinds summed over a second, the total", True),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "thread; 0 the whole process"),
        Field("kind", "u1", "names.HostKind"),
        Field("comm", "S16", "name of the process"),
        Field(
            "by_pid",
            "i4",
            "process that caused it: sender of the signal, issuer of the request, parent",
            True,
        ),
        Field("by_comm", "S16", "its name"),
        Field("value", "i8", "bytes, signal, exit code or count, depending on the kind", True),
        Field("device", "S32", "disk or source of the file system; network interface"),
        Field("file", "S128", "file; other end of a connection; control group"),
        Field("detail", "S64", "further details in words"),
        Field("cgroup", "u8", "number of its control group (v2)"),
    ),
)

POSITIONS = Table(
    "positions",
    "Code location of a thread, sampled from outside while its process made no collective for a long time.",
    (
        Field("ts_ns", "i8", "when"),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "the thread"),
        Field("stack", "i8", "row in `stacks`", True),
    ),
)

GPUS = Table(
    "gpus",
    "State of a GPU as reported by its driver: a row for a change above noise, and at long intervals.",
    (
        Field("ts_ns", "i8", "time of the driver query"),
        _PROCESS_FIELDS[0],
        Field("gpu", "u2", "number of the GPU, as the driver counts"),
        Field("mig", "i2", "number of the partition (MIG) on it; NULL for the GPU itself", True),
        Field("uuid", "S48", "its UUID, as in CUDA_VISIBLE_DEVICES"),
        Field("name", "S48", "its model"),
        Field("utilization_percent", "i2", "share of the driver's last sample in which a kernel ran", True),
        Field("memory_used_bytes", "i8", "GPU memory in use", True),
        Field("memory_total_bytes", "i8", "total GPU memory", True),
        Field("sm_mhz", "i4", "clock of the multiprocessors", True),
        Field("sm_max_mhz", "i4", "its maximum", True),
        Field("memory_mhz", "i4", "clock of the memory", True),
        Field("clock_reasons", "i8", "reasons for the present clock: bits, see names.CLOCK_REASONS", True),
        Field("power_mw", "i4", "power drawn", True),
        Field("power_limit_mw", "i4", "power allowed", True),
        Field("temperature_celsius", "i2", "temperature of the chip", True),
        Field("n_ecc_corrected", "i8", "memory errors corrected since the driver was loaded", True),
        Field("n_ecc_uncorrected", "i8", "memory errors that could not be corrected since then", True),
        Field("pcie_generation", "i2", "generation of the PCIe link now: low while the GPU idles", True),
        Field("pcie_width", "i2", "lanes of the link", True),
        Field("pcie_max_generation", "i2", "maximum generation of GPU and board", True),
        Field("pcie_max_width", "i2", "maximum number of lanes", True),
        Field("n_nvlinks_up", "i2", "NVLinks that are up", True),
        Field("n_nvlink_errors", "i8", "replays, recoveries and checksum errors on the NVLinks so far", True),
        Field("n_processes", "i2", "processes that use it", True),
        Field("xid", "i4", "error that the driver reports at this moment, by its Xid number", True),
    ),
)

GPU_PROCESSES = Table(
    "gpu_processes",
    "A process uses a GPU: a row at its first appearance, at each large change of its memory, and at its end.",
    (
        Field("ts_ns", "i8", "time of observation"),
        *_PROCESS_FIELDS,
        Field("gpu", "u2", "number of the GPU, as the driver counts"),
        Field("mig", "i2", "number of the partition (MIG) on it; NULL for the GPU itself", True),
        Field("alive", "u1", "1 while it uses the GPU; 0 once it has ended"),
        Field("memory_used_bytes", "i8", "GPU memory that it uses", True),
        Field("comm", "S16", "its name"),
    ),
)

SAMPLES = Table(
    "samples",
    "Code locations of threads, sampled about ten times a second: one row per thread, state and stack each second.",
    (
        Field("ts_ns", "i8", "end of the second that the row counts"),
        *_PROCESS_FIELDS,
        Field("role", "u1", "names.SampleRole: the reason for sampling the thread"),
        Field("owner_pid", "u4", "process of the thread: pid, or a child process of it"),
        Field("tid", "u4", "the thread"),
        Field("owner_comm", "S16", "name of that process"),
        Field("category", "u1", "state of the thread, names.Category"),
        Field("syscall_nr", "i4", "system call it was blocked in (numbers of this architecture)", True),
        Field(
            "object", "S160", "object of that system call: file, pipe and its other end, lock and its holder"
        ),
        Field("stack", "i8", "row in `stacks`", True),
        Field("n", "i4", "samples"),
    ),
)

GPU_USE = Table(
    "gpu_use",
    "Share of a GPU's time that its driver counts for a process: a row per process and second, without zeros.",
    (
        Field("ts_ns", "i8", "time of the driver query"),
        *_PROCESS_FIELDS,
        Field("gpu", "u2", "number of the GPU, as the driver counts"),
        Field(
            "sm_percent", "i2", "share of the driver's samples since the last row in which its kernels ran"
        ),
    ),
)

REQUESTS = Table(
    "requests",
    "A request over HTTP/1.1 or gRPC to an inference engine: one row at its end. No contents are recorded.",
    (
        Field("ts_ns", "i8", "its first byte reached the socket of the server"),
        *_PROCESS_FIELDS,
        Field("tid", "u4", "thread that read it"),
        Field("writer_tid", "u4", "thread that wrote the response; 0 none"),
        Field("engine", "S16", "vllm, sglang, triton, tgi, tensorrt-llm, llama.cpp, ollama or python"),
        Field(
            "model",
            "S64",
            "name of the model, by the path, by a gRPC request to Triton, or by the command line",
        ),
        Field("method", "S8", "GET, POST, PUT or HEAD"),
        Field(
            "path", "S64", "path without its query part; (unknown) on a gRPC connection from before the trace"
        ),
        Field("status", "i4", "HTTP status code of the response", True),
        Field("flags", "u1", "names.RequestFlag"),
        Field("request_bytes", "i8", "header and body"),
        Field("response_bytes", "i8", "header and body that were sent"),
        Field("n_tokens", "i8", "tokens of a streamed response; 0 for another response"),
        Field("read_ns", "i8", "the server read its first byte"),
        Field("complete_ns", "i8", "the server read its last byte", True),
        Field("answer_ns", "i8", "the server sent the header of the response", True),
        Field("first_ns", "i8", "the server sent the first token, or the first byte of the body", True),
        Field("last_ns", "i8", "the server sent the last token, or the last byte", True),
        Field("end_ns", "i8", "end of the response, or of its connection"),
        Field("gap_ns", "i8", "the longest time between two of its tokens"),
        Field("gap_at_ns", "i8", "start of that time", True),
        Field("blocked_ns", "i8", "time in which the client did not take data that the server had written"),
        Field("id_hash", "i8", "FNV-1a hash of the id that the JSON of the response begins with", True),
        Field(
            "client",
            "i8",
            "lower 32 bits: hash of the client's address without its port, with a random key of each start of the "
            "agent; upper bits: random number of the start",
            True,
        ),
    ),
)

TOKENS = Table(
    "tokens",
    "Times between tokens: one row per process, path and second.",
    (
        Field("ts_ns", "i8", "end of the second"),
        *_PROCESS_FIELDS,
        Field("path", "S64", "path of the requests"),
        Field("n", "i8", "times between two tokens of a response"),
        Field("total_ns", "i8", "their sum"),
        Field("max_ns", "i8", "the longest"),
        Field(
            "histogram", "S2048", 'n by length: {"upper edge in us": n}, each edge 9 % above the edge before'
        ),
    ),
)

ITERATIONS = Table(
    "iterations",
    "Iterations of an inference engine, by the tokens that it sent: one row per process and second.",
    (
        Field("ts_ns", "i8", "end of the second"),
        *_PROCESS_FIELDS,
        Field("n", "i8", "iterations: each sends at most one token of a response"),
        Field("n_tokens", "i8", "their tokens, without the first token of a response"),
        Field("max_tokens", "i4", "the most tokens of an iteration: the largest batch"),
        Field(
            "total_ns",
            "i8",
            "sum of the times between the begins of two iterations of which a response has tokens",
        ),
        Field("max_ns", "i8", "the longest of these times"),
        Field("max_at_ns", "i8", "its begin", True),
        Field("histogram", "S2048", "their number by length, as in `tokens`"),
    ),
)
ENGINE_SPANS = Table(
    "engine_spans",
    "A span that an inference engine has sent to the agent: one row for each request. Times are the engine's own.",
    (
        Field("ts_ns", "i8", "arrival of the request at the engine, by the clock of the machine"),
        Field("node", "u4", "number of the event's node; its name is in `nodes`"),
        Field("model", "S64", "name of the model; empty if the span does not state it"),
        Field("id_hash", "i8", "FNV-1a hash of the id of the request, as in `requests`"),
        Field("queue_ns", "i8", "until the engine began to work on the request", True),
        Field("prefill_ns", "i8", "from the begin of the engine's work until the first token", True),
        Field("decode_ns", "i8", "from the first token until the last", True),
        Field("first_ns", "i8", "from the arrival until the first token", True),
        Field("whole_ns", "i8", "from the arrival until the end"),
    ),
)

ENGINE_METRICS = Table(
    "engine_metrics",
    "The metrics that an inference engine publishes itself: one row per read. Numbers and times since its start.",
    (
        Field("ts_ns", "i8", "when"),
        *_PROCESS_FIELDS,
        Field("group_pid", "u4", "as in `servers`"),
        Field("engine", "S16", "as in `requests`"),
        Field("model", "S64", "as in `requests`"),
        Field("n_waiting", "i4", "requests in the queue now", True),
        Field("n_running", "i4", "requests in the batch now", True),
        Field("kv_permille", "i4", "share of the KV cache in use now, in 1/1000", True),
        Field("n_preempted", "i8", "requests that lost their space in the KV cache", True),
        Field("n_prefix_queries", "i8", "tokens looked up in the prefix cache", True),
        Field("n_prefix_hits", "i8", "tokens found in it", True),
        *(
            field
            for name, meaning in (
                ("queue", "in the queue"),
                ("prefill", "of prefill"),
                ("decode", "of decoding"),
                ("first", "until the first token"),
                ("between", "between two tokens"),
                ("whole", "until the end of the response"),
            )
            for field in (
                Field(f"n_{name}", "i8", f"number of times {meaning}", True),
                Field(f"{name}_ns", "i8", "their sum", True),
            )
        ),
    ),
)
SERVERS = Table(
    "servers",
    "A process of an inference engine: a row when it is found, and a row per second while it has open requests.",
    (
        Field("ts_ns", "i8", "when"),
        *_PROCESS_FIELDS,
        Field("group_pid", "u4", "first process of the engine: its processes share this number"),
        Field("engine", "S16", "as in `requests`"),
        Field("model", "S64", "as in `requests`"),
        Field("n_open", "i4", "requests without the end of a response"),
        Field("oldest_ns", "i8", "arrival of the oldest open request whose socket is not full", True),
        Field("oldest_path", "S64", "its path"),
        Field("oldest_progress_ns", "i8", "its last token, or its arrival", True),
        Field("progress_ns", "i8", "last token or byte of a body, of any request that is open now", True),
        Field("n_full", "i4", "of n_open: the client does not take data, so the socket is full"),
    ),
)

GPU_COUNTERS = Table(
    "gpu_counters",
    "Hardware counters of a GPU (NVML's GPM, Hopper and later): means since the previous reading.",
    (
        Field("ts_ns", "i8", "time of the reading"),
        _PROCESS_FIELDS[0],
        Field("gpu", "u2", "number of the GPU, as the driver counts"),
        Field("interval_ns", "i8", "time since the previous reading"),
        Field("sm_percent", "i2", "multiprocessors with work, of all, on average", True),
        Field("tensor_percent", "i2", "use of the tensor cores", True),
        Field("memory_percent", "i2", "use of the bandwidth of the GPU's memory", True),
        Field("pcie_sent_bytes_per_s", "i8", "from the GPU over PCIe", True),
        Field("pcie_received_bytes_per_s", "i8", "to the GPU over PCIe", True),
        Field("nvlink_sent_bytes_per_s", "i8", "from the GPU over all NVLinks", True),
        Field("nvlink_received_bytes_per_s", "i8", "to the GPU over all NVLinks", True),
    ),
)

GPU_KERNELS = Table(
    "gpu_kernels",
    "An operation of NCCL on the GPU, recorded by NCCL's profiler plugin while it is switched on.",
    (
        Field("ts_ns", "i8", "the host enqueued it; in a CUDA graph: NCCL's call before the kernel starts"),
        *_PROCESS_FIELDS,
        Field("comm_hash", "u8", "communicator: NCCL's own hash, not the hash in `collectives`"),
        Field("comm_rank", "i4", "rank in the communicator", True),
        Field("nranks", "i4", "ranks in the communicator", True),
        Field("seq", "i8", "NCCL's number of the call, per communicator and operation", True),
        Field("op", "u2", "operation, names.Op"),
        Field("peer_rank", "i4", "the peer of a transfer", True),
        Field("count", "i8", "elements", True),
        Field("n_channels", "u1", "channels of its kernel"),
        Field("flags", "u1", "names.GpuKernelFlag"),
        Field("start_ns", "i8", "first channel of its kernel starts, on the GPU's clock", True),
        Field("end_ns", "i8", "last channel ends, on the GPU's clock", True),
        Field("noticed_ns", "i8", "NCCL's thread noticed the start, microseconds after it", True),
        Field("network_ns", "i8", "of IS_NETWORK: time in which the network held its data", True),
    ),
)

LATENCIES = Table(
    "latencies",
    "Requests of one process and path that ended in ten seconds: counts and histograms. Agents send it to a hub.",
    (
        Field("ts_ns", "i8", "end of the interval"),
        *_PROCESS_FIELDS,
        Field("engine", "S16", "as in `requests`"),
        Field("model", "S64", "as in `requests`"),
        Field("path", "S64", "as in `requests`; (other) for the paths with the fewest requests"),
        Field("n", "i8", "requests that ended"),
        Field("n_failed", "i8", "of them: status 500 or above"),
        Field("n_aborted", "i8", "of them: the connection was closed before the end of the response"),
        Field("n_tokens", "i8", "tokens of their responses"),
        Field("first", "S2048", "histogram of the times until the first token or byte, as in `tokens`"),
        Field("whole", "S2048", "histogram of the times until the end"),
        Field("between", "S2048", "histogram of the times between tokens"),
    ),
)

NODE_VERDICTS = Table(
    "node_verdicts",
    "Changes of incidents that only the diagnosis on the machine can judge, as it has stacks and single requests.",
    (
        Field("ts_ns", "i8", "when the agent sent the row; open incidents are repeated every minute"),
        Field("incident", "S32", "id of the incident on its machine"),
        Field("change", "S8", "opened, updated or closed"),
        Field("verdict", "S16384", "JSON: the flat row of the verdict, and the whole verdict"),
    ),
)

TABLES = (COLLECTIVES, CALLS, OFFCPU, SNAPSHOTS, COMMUNICATORS, PROCESSES, SPANS)

SERVING_TABLES = (REQUESTS, TOKENS, SERVERS, ENGINE_METRICS, ENGINE_SPANS)
"""The tables of inference engines that the diagnosis reads."""

JOB_TABLES = (*TABLES, OWNERS, GPU_KERNELS)
"""The tables whose rows belong to processes of a job."""

SENT_TABLES = (*JOB_TABLES, IDLE_GPUS)
"""The tables that agents send to a hub for its diagnosis."""

HUB_TABLES = (*SENT_TABLES, SERVERS, LATENCIES, NODE_VERDICTS)
"""SENT_TABLES, which the hub diagnoses, and tables that it stores."""

NODE_TABLES: tuple[Table, ...] = (
    OWNERS,
    GPU_KERNELS,
    IDLE_GPUS,
    OPERATIONS,
    MEMORY,
    CALL_ARGUMENTS,
    HOST_EVENTS,
    POSITIONS,
    GPUS,
    GPU_PROCESSES,
    GPU_USE,
    GPU_COUNTERS,
    SAMPLES,
    REQUESTS,
    TOKENS,
    SERVERS,
    ITERATIONS,
    ENGINE_METRICS,
    ENGINE_SPANS,
)
"""Further event tables of a node trace; most stay there, and are not arrays of a Trace. A trace from before one of
them was added lacks it."""

EVENT_TABLES = (*TABLES, *NODE_TABLES)
"""The event tables of a node trace."""

CALL_COUNTS = Table(
    OPERATIONS.name,
    OPERATIONS.meaning,
    tuple(field for field in OPERATIONS.fields if field.name != "histogram"),
)
"""`operations` in the arrays of a Trace, without the histograms, which are nine tenths of its size."""

ARRAYS = (
    *TABLES,
    ANNOTATIONS,
    OWNERS,
    GPU_KERNELS,
    IDLE_GPUS,
    HOST_EVENTS,
    POSITIONS,
    GPUS,
    GPU_PROCESSES,
    GPU_USE,
    GPU_COUNTERS,
    CALL_COUNTS,
    SAMPLES,
    REQUESTS,
    TOKENS,
    SERVERS,
    ENGINE_METRICS,
    ENGINE_SPANS,
)
"""The arrays of a Trace. The arrays that are not in SENT_TABLES are not sent to a hub."""


@cache
def dtype(table: Table) -> np.dtype[Any]:
    """The packed numpy dtype of a table, fields in order."""
    return np.dtype([(field.name, field.format) for field in table.fields])


def joined(arrays: Sequence[Array]) -> Array:
    """The concatenation of arrays of the same dtype; a single array is returned unchanged.

    Concatenated as bytes, because numpy takes long to compare fields and copies them one at a time.
    """
    if len(arrays) == 1:
        return arrays[0]
    joined_bytes = np.concatenate([array.view(np.uint8) for array in arrays])
    return joined_bytes.view(arrays[0].dtype)


def process_keys(rows: Array) -> Array:
    """One number for each row's process: node << 32 | pid, int64 (n,)."""
    keys: Array = rows["node"].astype(np.int64) << 32 | rows["pid"].astype(np.int64)
    return keys


def is_node_trace(head: bytes) -> bool:
    """Whether a file with these first 72 bytes is a node trace, possibly a damaged node trace."""
    return head[:16] == SQLITE_MAGIC and int.from_bytes(head[68:72], "big") == APPLICATION_ID


def empty(table: Table, n: int = 0) -> Array:
    """n rows with unknown in every field that may be unknown, and zero in all others."""
    rows = np.zeros(n, dtype(table))
    for field in table.fields:
        if field.may_be_unknown:
            rows[field.name] = UNKNOWN
    return rows
