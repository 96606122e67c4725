"""The records and maps of the kernel side: the structs of bpf/events.h as numpy dtypes, with equal names and offsets.

The loader compares them field by field with the type information in the built object before the first record
is read (capture/probes/program.py). capture/rows/records.py turns them into the tables of layout.py.
"""

from enum import IntEnum

import numpy as np

from stallscope.events.names import N_CATEGORIES

N_SLOTS = 8
"""GPU threads of a process that the ledger follows at a time."""

N_GROUPS = 8
"""Groups of probes that are counted, HookGroup."""

ARRIVAL = np.dtype(
    [
        *((name, "<i8") for name in ("ts_ns",)),
        *((name, "<u8") for name in ("comm_hash", "comm")),
        *((name, "<i8") for name in ("seq", "count")),
        ("stream", "<u8"),
        *((name, "<i8") for name in ("wait_enter_ns", "wait_leave_ns")),
        *((name, "<u4") for name in ("pid", "tid")),
        *((name, "<i4") for name in ("comm_rank", "nranks", "peer_rank")),
        ("op", "<u2"),
        ("datatype", "u1"),
        ("reduce_op", "u1"),
        *((name, "<u4") for name in ("flags", "n_threads", "n_syncs", "n_allocs", "n_copies", "n_launches")),
        ("ledger_ns", "<i8", (N_CATEGORIES,)),
        ("device", "<i4"),
        ("spare", "<u4"),
    ]
)
"""struct arrival: one collective or point-to-point call. `comm` is the process's handle."""

_HEAD = [
    ("ts_ns", "<i8"),
    ("duration_ns", "<i8"),
    ("pid", "<u4"),
    ("tid", "<u4"),
    ("kind", "<u2"),
    ("op", "<u2"),
    ("symbol", "<u2"),
    ("category", "u1"),
    ("flags", "u1"),
]

EVENT = np.dtype([*_HEAD, ("rest", "<u8", (11,))])
"""struct event: a record of any kind below; view() the rows of one kind as that kind's dtype."""

CALL = np.dtype(
    [
        *_HEAD,
        ("count_bytes", "<i8"),
        ("stream", "<u8"),
        ("result", "<i4"),
        ("device", "<i4"),
        ("address", "<u8"),
        ("handle", "<u8"),
        ("grid", "<u4", (3,)),
        ("block", "<u4", (3,)),
        *((name, "u1") for name in ("direction", "host_memory", "memory")),
        ("spare1", "u1", (5,)),
        ("stack", "<u8"),
        ("spare", "<u8", (1,)),
    ]
)
"""struct call_event: a call that was slow or failed."""

OFF_CPU = np.dtype(
    [
        *_HEAD,
        ("runnable_ns", "<i8"),
        *((name, "<i4") for name in ("syscall_nr", "waker_pid", "waker_tid", "by_pid")),
        ("by_comm", "S16"),
        ("inode", "<u8"),
        ("device", "<u4"),
        ("fd", "<i4"),
        ("file", "S24"),
        ("stack", "<u8"),
    ]
)
"""struct off_event: a long interval off the CPU. device, file: the file that blocked the thread."""

ENDS = np.dtype(
    [
        *((name, "<u2") for name in ("family", "peer_port", "own_port", "spare")),
        ("peer", "u1", (16,)),
    ]
)
"""struct ends: both ends of a connection; the peer's port is in network order."""

HOST = np.dtype(
    [
        *_HEAD,
        ("cgroup", "<u8"),
        ("value", "<i8"),
        ("device", "<u4"),
        ("by_pid", "<i4"),
        ("by_comm", "S16"),
        ("request", "<u4"),
        ("spare", "<u4", (3,)),
        ("name", "S32"),
    ]
)
"""struct host_event: an event of the machine that affected a process; op: names.HostKind."""

HOST_SUMS = np.dtype([("n_migrations", "<u8"), ("n_short", "<u8", (2,)), ("short_ns", "<u8", (2,))])
"""struct host_sums: migrations and short stalls of a process."""

N_DELAYS = 32
DISK_KEY = np.dtype([(name, "<u4") for name in ("pid", "device", "request", "spare")])
DISK_SUMS = np.dtype([*((name, "<u8") for name in ("n", "n_bytes", "ns")), ("delays", "<u8", (N_DELAYS,))])
"""struct disk_sums: requests of a process to a disk; delays: the number of requests that took 2^i us."""

RESENT = np.dtype(
    [("n", "<u8"), ("first_ns", "<i8"), ("last_ns", "<i8"), ("ends", ENDS), ("interface", "S16")]
)
"""struct resent: retransmitted segments of a socket."""

LIFE = np.dtype(
    [
        *_HEAD,
        *((name, "<u8") for name in ("comm_hash", "comm", "parent_hash")),
        *((name, "<i4") for name in ("comm_rank", "nranks", "parent_rank", "parent_nranks")),
        *((name, "<i4") for name in ("color", "key", "n_splits", "device")),
        ("name", "S16"),
        ("spare", "<u8", (2,)),
    ]
)
"""struct life_event: start or end of a process or a communicator."""

RAW = np.dtype([*_HEAD, ("sp", "<u8"), ("syscall_nr", "<i4"), ("state", "<u4"), ("spare", "<u8", (9,))])
"""struct raw_event: the input of the ledger."""

PYTHON = np.dtype(
    [
        *((name, "<u8") for name in ("interpreters", "code_type")),
        *((name, "<u4") for name in ("threads_head", "thread_next", "thread_id", "current_frame", "cframe")),
        *((name, "<u4") for name in ("frame_previous", "frame_code", "frame_instr", "frame_owner")),
        *((name, "<u4") for name in ("first_unowned", "code_filename", "code_qualname", "code_linetable")),
        ("code_first_line", "<u4"),
        *((name, "u1") for name in ("has_cframe", "has_owner", "is_index", "frame_bytes")),
        ("spare", "u1", (4,)),
    ]
)
"""struct python: the offsets of the interpreter of a process."""

STACK_FRAME = np.dtype(
    [
        *((name, "<u8") for name in ("code", "instruction", "filename", "qualname", "linetable")),
        ("first_line", "<i4"),
        ("spare", "<u4"),
    ]
)
"""struct stack_frame: a Python function of a stack."""

N_FRAMES = 40

STACK = np.dtype(
    [
        ("hash", "<u8"),
        *((name, "<u4") for name in ("pid", "tid", "n", "is_cut")),
        ("frames", STACK_FRAME, (N_FRAMES,)),
        ("spare", "<u8", (12,)),
    ]
)
"""struct stack: the Python frames of a thread, innermost first."""

PEEK_REQUEST = np.dtype([("address", "<u8"), ("tid", "<u4"), ("n_pieces", "<u4")])
"""struct peek_request: a thread, and the address and length of memory to read from its process."""

PEEK_BYTES = 4096
"""A piece of memory. The valid part ends with the page in which it begins; the rest is undefined."""

PEEK_PIECES = 6
"""Maximum number of pieces in a request."""

REGISTERS = np.dtype([(name, "<u8") for name in ("ip", "sp", "bp", "bx", "r12", "r13", "r14", "r15")])
"""struct registers: the user-mode registers that lead to the caller."""

HOOKED_RETURN = np.dtype([("at", "<u8"), ("address", "<u8")])
"""struct hooked_return: a return address that a probe has replaced, and its location."""

N_HOOKED = 6

PEEK_THREAD = np.dtype(
    [
        ("registers", REGISTERS),
        ("n_switches", "<u8"),
        ("tid", "<u4"),
        ("syscall_nr", "<i4"),
        *((name, "<u4") for name in ("is_on_cpu", "spare")),
        ("hooked", HOOKED_RETURN, (N_HOOKED,)),
    ]
)
"""struct peek_thread: the registers of a thread."""

NATIVE = np.dtype(
    [
        *((name, "<u8") for name in ("hash", "python")),
        *((name, "<u4") for name in ("pid", "tid", "n_bytes", "is_return")),
        ("registers", REGISTERS),
        ("hooked", HOOKED_RETURN, (N_HOOKED,)),
        ("stack", "u1", (3896,)),
    ]
)
"""struct native: a copy of a thread's stack."""

N_RETURNS = 16

NATIVE_SHAPE = np.dtype(
    [("check", "<u8"), ("n", "<u2"), ("is_known", "<u2"), ("spare", "<u4"), ("at", "<u2", (N_RETURNS,))]
)
"""struct native_shape: the locations of return addresses on a stack."""

SLOT = np.dtype(
    [
        ("tid", "<u4"),
        *((name, "u1") for name in ("call", "off", "blocked", "waker_flags")),
        ("last_hook_ns", "<i8"),
        ("class_op", "<u2"),
        ("nccl_op", "<u2"),
        ("syscall_nr", "<i4"),
        *((name, "<i8") for name in ("class_since_ns", "nccl_since_ns", "off_ns", "base_ns", "woken_ns")),
        ("on_ns", "<i8"),
        *((name, "<u8") for name in ("on_runtime", "off_runtime", "off_run_delay", "own_base")),
        ("low_base", "<u8", (4,)),
        ("hook_runtime", "<u8"),
        *((name, "<i4") for name in ("waker_pid", "waker_tid", "by_pid")),
        ("is_mending", "<u4"),
        *((name, "<u4") for name in ("is_idle", "last_way_ns", "walk_apart_ns")),
        *((name, "u1") for name in ("off_category", "off_flags", "has_yielded", "has_base")),
        ("by_comm", "S16"),
        ("scheduler_ns", "<u8"),
        ("way_ns", "<u8", (N_GROUPS,)),
        ("inside_ns", "<u8", (N_GROUPS,)),
        ("stack", "<u8"),
        ("walked_ns", "<i8"),
        ("walked_at", "<u8"),
        *((name, "<u4") for name in ("n_contained", "n_bare")),
    ]
)
"""struct slot: the state of a GPU thread that other threads may read; tid 0: empty."""

PROCESS = np.dtype(
    [
        *((name, "<u8") for name in ("word", "begun", "ended")),
        ("ns", "<u8", (N_CATEGORIES + 1,)),
        *(
            (name, "<i8")
            for name in ("born_ns", "n_collectives", "n_synced", "wait_enter_ns", "wait_leave_ns")
        ),
        ("capture_ns", "<i8"),
        ("reported_ns", "<u8", (N_CATEGORIES,)),
        ("n_lost", "<u8"),
        *((name, "<u4") for name in ("n_syncs", "n_allocs", "n_copies", "n_launches")),
        ("uses_nccl", "<u8"),
        ("slots", SLOT, (N_SLOTS,)),
    ]
)
"""struct process: a traced process. Add the time so far to the ledger of its state, the largest byte of word."""

FUNCTION = np.dtype(
    [
        *(
            (name, "u1")
            for name in ("shape", "group", "direction", "memory", "count", "scale", "rows", "kind")
        ),
        *((name, "u1") for name in ("target", "source", "stream", "handle", "out", "n_stack")),
        ("spare", "u1", (2,)),
    ]
)
"""struct function: how to read the arguments of a CUDA function."""

N_BUCKETS = 32
FIRST_BUCKET_BITS = 7

OPERATION_KEY = np.dtype([("tgid", "<u4"), ("symbol", "<u2"), ("direction", "u1"), ("host_memory", "u1")])

OPERATION = np.dtype(
    [
        *((name, "<u8") for name in ("n", "n_failed", "total_ns", "max_ns", "first_ns", "count_bytes")),
        ("histogram", "<u4", (N_BUCKETS,)),
    ]
)
"""struct operation: all calls of a function by a process. Bucket i: shorter than 2^(FIRST_BUCKET_BITS + i) ns."""

BALANCE_KEY = np.dtype([("tgid", "<u4"), ("device", "<i2"), ("memory", "<u2")])

BALANCE = np.dtype(
    [
        *((name, "<i8") for name in ("live_bytes", "n_live", "peak_bytes")),
        *((name, "<u8") for name in ("n_allocs", "allocated_bytes", "n_frees", "n_unknown_frees")),
    ]
)
"""struct balance: memory of a kind that a process holds."""

LIVE_KEY = np.dtype([("address", "<u8"), ("tgid", "<u4"), ("is_handle", "<u4")])

LIVE = np.dtype([("n_bytes", "<u8"), ("device", "<i2"), ("memory", "<u2"), ("n_retained", "<u4")])
"""struct live: an allocation that is not freed yet."""

REQUEST = np.dtype(
    [
        *((name, "<i8") for name in ("ts_ns", "read_ns", "complete_ns", "answer_ns", "first_ns", "last_ns")),
        *((name, "<i8") for name in ("end_ns", "gap_ns", "gap_at_ns", "blocked_ns")),
        *((name, "<u8") for name in ("request_bytes", "response_bytes", "id")),
        *((name, "<u4") for name in ("pid", "tid", "writer_tid", "n_tokens", "path_hash")),
        ("status", "<u2"),
        ("flags", "u1"),
        ("huffman_bytes", "u1"),
        ("method", "S4"),
        ("client", "<u4"),
        ("path", "S64"),
        ("model", "S40"),
        ("id_hash", "<u8"),
    ]
)
"""struct request_event: a request to a server; times are 0 until they are known."""

TOKEN = np.dtype([("ts_ns", "<i8"), ("gap_ns", "<i8"), ("pid", "<u4"), ("path_hash", "<u4")])
"""struct token_event: a token after the first token of a response."""

WAITING = np.dtype(
    [
        *((name, "<i8") for name in ("ts_ns", "read_ns", "complete_ns")),
        ("request_bytes", "<u8"),
        ("method", "S4"),
        ("path", "S64"),
        ("path_hash", "<u4"),
    ]
)
"""struct waiting: a pipelined request."""

CONNECTION = np.dtype(
    [
        ("request", REQUEST),
        *((name, "<i8") for name in ("arrived_ns", "body_left", "answer_left", "full_since_ns", "send_ns")),
        ("send_length", "<i8"),
        ("send_header_bytes", "<u4"),
        ("send_status", "<u2"),
        *((name, "u1") for name in ("send_kind", "send_is_chunked", "has_header", "is_chunked", "n_waiting")),
        ("is_filled", "u1"),
        ("client", "<u4"),
        ("waiting", WAITING, (4,)),
    ]
)
"""struct connection: a connection to a server, with the request that is open (ts_ns 0: none)."""

FRAMES = np.dtype(
    [
        *((name, "<u4") for name in ("left", "stream")),
        ("value", "<u8"),
        ("header", "u1", (32,)),
        *((name, "u1") for name in ("n_header", "type", "flags", "padding", "needs_padding", "skip")),
        *((name, "u1") for name in ("n_value", "ends_stream")),
    ]
)
"""struct frames: the bytes of one direction of an HTTP/2 connection."""

FIELDS = np.dtype(
    [
        ("name", "<u8"),
        *((name, "<u4") for name in ("n_inserted", "number", "text_left", "value_hash")),
        *((name, "u1") for name in ("state", "shift", "is_wanted", "is_inserted", "is_huffman")),
        *((name, "u1") for name in ("name_bytes", "value_bytes", "huffman_bytes", "kind", "is_out")),
        ("spare", "u1", (6,)),
        ("value", "S64"),
    ]
)
"""struct fields: the state of HPACK."""

HTTP2 = np.dtype(
    [
        ("id", "<u8"),
        *((name, "<i8") for name in ("arrived_ns", "full_since_ns", "blocked_ns", "window", "opened_ns")),
        ("stream_window", "<i8"),
        *((name, "<u4") for name in ("ends_stream", "n_open", "client")),
        ("knows_windows", "u1"),
        ("spare", "u1", (3,)),
        ("in", FRAMES),
        ("out", FRAMES),
        ("in_fields", FIELDS),
        ("out_fields", FIELDS),
    ]
)
"""struct http2: an HTTP/2 connection to a server."""

STREAM_KEY = np.dtype([("connection", "<u8"), *((name, "<u4") for name in ("stream", "is_out"))])

MESSAGE = np.dtype([("left", "<u4"), ("n_prefix", "u1"), ("is_begun", "u1"), ("prefix", "u1", (14,))])
"""struct message: the gRPC messages of one direction of a stream."""

STREAM = np.dtype(
    [
        ("request", REQUEST),
        *((name, "<i8") for name in ("blocked_before_ns", "credit", "stalled_ns", "opened_ns")),
        ("in", MESSAGE),
        ("out", MESSAGE),
        ("n_messages", "<u4"),
        *((name, "u1") for name in ("is_half_closed", "is_plain", "n_headers")),
        ("spare", "u1", (1,)),
    ]
)
"""struct stream: an open request on an HTTP/2 connection."""

STRUCTS = {
    "arrival": ARRIVAL,
    "event": EVENT,
    "call_event": CALL,
    "off_event": OFF_CPU,
    "life_event": LIFE,
    "raw_event": RAW,
    "host_event": HOST,
    "ends": ENDS,
    "host_sums": HOST_SUMS,
    "disk_key": DISK_KEY,
    "disk_sums": DISK_SUMS,
    "resent": RESENT,
    "python": PYTHON,
    "stack_frame": STACK_FRAME,
    "stack": STACK,
    "peek_request": PEEK_REQUEST,
    "registers": REGISTERS,
    "hooked_return": HOOKED_RETURN,
    "native": NATIVE,
    "native_shape": NATIVE_SHAPE,
    "peek_thread": PEEK_THREAD,
    "slot": SLOT,
    "process": PROCESS,
    "function": FUNCTION,
    "operation_key": OPERATION_KEY,
    "operation": OPERATION,
    "balance_key": BALANCE_KEY,
    "balance": BALANCE,
    "live_key": LIVE_KEY,
    "live": LIVE,
    "request_event": REQUEST,
    "token_event": TOKEN,
    "waiting": WAITING,
    "connection": CONNECTION,
    "frames": FRAMES,
    "fields": FIELDS,
    "http2": HTTP2,
    "stream_key": STREAM_KEY,
    "message": MESSAGE,
    "stream": STREAM,
}
"""The dtype of each C struct, by its name."""


class Kind(IntEnum):
    """enum event_kind: the struct of an event."""

    NONE = 0
    CALL = 1
    OFF_CPU = 2
    PROCESS = 3
    EXEC = 4
    EXIT = 5
    COMM_BORN = 6
    COMM_DEAD = 7
    HOST = 12
    ENTER = 16
    RETURN = 17
    OFF = 18
    ON = 19
    WAKEUP = 20
    BORN = 21
    DEAD = 22
    SNAPSHOT = 23


FIRST_RAW = Kind.ENTER
"""Kinds from this number on occur only with Options.record_all."""


class Counter(IntEnum):
    """enum counter: lost, missed or torn records."""

    LOST_ARRIVAL = 0
    LOST_CALL = 1
    LOST_OFF_CPU = 2
    LOST_LIFE = 3
    LOST_RAW = 4
    LOST_PROCESS = 5
    LOST_THREAD = 6
    LOST_COMM = 7
    LOST_CHANGE = 8
    TORN_SNAPSHOT = 9
    MISSED_ON = 10
    MISSED_WAKEUP = 11
    STOLEN = 12
    UNGROUPED = 13
    UNGRAPHED = 14
    LOST_HOST = 15
    LOST_OPERATION = 16
    LOST_ALLOCATION = 17
    RAISED = 18
    LOST_STACK = 19
    REFUSED_STACK = 20
    LOST_REQUEST = 21


class Action(IntEnum):
    """enum action: the action of a probe."""

    CALL = 0
    COLLECTIVE = 1
    GROUP_START = 2
    GROUP_END = 3
    INIT_RANK = 4
    INIT_SCALABLE = 5
    INIT_ALL = 6
    SPLIT = 7
    SHRINK = 8
    GROW = 9
    DESTROY = 10
    SET_DEVICE = 11
    CAPTURE_BEGIN = 12
    CAPTURE_END = 13
    INSTANTIATE = 14
    GRAPH_LAUNCH = 15
    ENQUEUE = 16
    GROUP_SIMULATE = 17


class Shape(IntEnum):
    """enum shape: how to read the arguments of a CUDA function."""

    PLAIN = 0
    COPY = 1
    RUNTIME_3D = 2
    RUNTIME_3D_PEER = 3
    DRIVER_2D = 4
    DRIVER_3D = 5
    LAUNCH_RUNTIME = 6
    LAUNCH_DRIVER = 7
    LAUNCH_CONFIG = 8
    OUT = 9
    ALLOC = 10
    ALLOC_PITCH = 11
    ALLOC_3D = 12
    CREATE = 13
    REGISTER = 14
    FREE = 15
    RETAIN = 16


class HookGroup(IntEnum):
    """enum hook_group: when probes are on."""

    ALWAYS = 0
    COPIES = 1
    HOT = 2
    RUNTIME_WAITS = 3
    GRAPH_LAUNCHES = 4
    WAITS = 5
