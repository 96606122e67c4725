"""The enumerations used in records. bpf/events.h has the same numbers; a test compares both.

Every enumeration starts with 0 = unknown or none, so that a zeroed record makes no statement.
"""

from enum import IntEnum, IntFlag


class Category(IntEnum):
    """The states of the GPU threads of a process; exclusive, and together they fill the interval.

    The outermost CUDA call takes precedence over the off-CPU state, except preempted and stopped, which always
    count as such. The number is also the precedence when the threads of one process are combined: the process is in
    the state of its most active GPU thread, which has the largest number. The wait of an idle thread
    (futex, poll, sleep) is therefore below a synchronise call.
    """

    NONE = 0  # no GPU thread yet
    LOCK = 1  # blocked in futex
    OTHER_OFF = 2  # blocked in another or an unknown system call
    SLEEP = 3  # blocked in nanosleep, clock_nanosleep; poll and select without descriptors
    NET = 4  # blocked in poll, select, epoll_wait, recv*, send*
    CHILD = 5  # blocked until a child process woke it (data loader workers)
    WAIT_GPU = 6  # in a synchronise call or a copy to the host, with a collective enqueued since the previous such call
    DEVICE = (
        7  # inside a synchronise call without a collective: the rank's own device time, not a wait for others
    )
    STOPPED = 8  # stopped or traced (state 4, 8), or frozen by its cgroup
    PREEMPTED = 9  # off the CPU while runnable, or woken and not yet running
    FAULT = 10  # page faults, reclaim, compaction
    DRIVER = 11  # blocked in ioctl outside the calls below
    IO = 12  # waiting for a disk: in_iowait, or blocked in read, write, fsync and similar calls
    LAUNCH = 13  # inside a launch; only while launch timing is on
    COPY = 14  # inside cudaMemcpy*, driver equivalents
    ALLOC = 15  # inside cudaMalloc, cudaFree, cudaHostAlloc, driver equivalents
    ON_CPU = 16  # running outside the calls above


N_CATEGORIES = len(Category) - 1
"""Categories with time; column i of a ledger is Category(i + 1)."""

CATEGORY_NAMES = tuple(c.name.lower() for c in Category if c)


class Op(IntEnum):
    """Traced operations: collectives first, then the other calls by the class that the ledger needs."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    SEND = 9
    RECV = 10
    GROUP = 11  # ncclGroupStart .. ncclGroupEnd
    ONE_SIDED = 12  # puts, signals and waits for them: no round of a communicator
    COMM_INIT = 16
    COMM_SPLIT = 17
    COMM_DESTROY = 18  # also finalize, revoke and abort
    COMM_SETUP = 19  # setup of a communicator: buffers, windows; suspended and resumed
    SYNC = 32
    ALLOC = 33
    FREE = 34
    COPY = 35
    LAUNCH = 36
    GRAPH_LAUNCH = 37
    STREAM_WAIT = 38
    EVENT_RECORD = 39
    EVENT = 40  # created or destroyed
    STREAM = 41  # created or destroyed
    MODULE = 42  # code loaded or unloaded: slow first calls
    GRAPH = 43  # captured, instantiated, updated or destroyed
    MEMSET = 44
    CONTEXT = 45  # the driver, a device or a context set up or torn down
    IOCTL = 46  # a call into the GPU's driver, by any library
    COMPUTE = 48  # a span of device work reported by an importer


P2P_OPS = (Op.SEND, Op.RECV)
SYNCHRONISING_OPS = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL)
"""No rank can leave these before every rank has entered them."""

CALL_CATEGORY = {
    Op.ALLOC: Category.ALLOC,
    Op.FREE: Category.ALLOC,
    Op.COPY: Category.COPY,
    Op.LAUNCH: Category.LAUNCH,
    Op.GRAPH_LAUNCH: Category.LAUNCH,
}
"""The category of a thread inside such a call. The context decides whether a synchronise call is a wait."""


class Datatype(IntEnum):
    """ncclDataType_t + 1 (nccl.h 2.28), so that 0 is unknown."""

    NONE = 0
    INT8 = 1
    UINT8 = 2
    INT32 = 3
    UINT32 = 4
    INT64 = 5
    UINT64 = 6
    FLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    BFLOAT16 = 10
    FLOAT8_E4M3 = 11
    FLOAT8_E5M2 = 12


DATATYPE_BYTES = (0, 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Size of one element, by Datatype."""


class CollectiveFlag(IntFlag):
    """Properties of one collective record that a reader must know."""

    TORN = 1  # the ledger changed while it was copied
    THREADS_LOST = 2  # the process has more GPU threads than the ledger follows
    NO_LEDGER = 4  # the source keeps no ledger: ledger_ns means nothing
    LATE_ATTACH = 8  # seq does not count from the communicator's creation
    GROUPED = 16  # arrival is the arrival at the enclosing ncclGroupEnd
    GRAPH = 32  # replayed from a CUDA graph: arrival is the graph launch
    OPEN = 64  # the source reports it as started and not finished
    NOT_STARTED = 128  # the source reports it as enqueued and not started on the GPU
    NO_SYSCALLS = 256  # off-CPU time could not be classified: lock, sleep, net, child are in other_off
    NUMBERED = 512  # with LATE_ATTACH: seq is the library's own number nevertheless, the same on all ranks


class GpuKernelFlag(IntFlag):
    """Properties of one operation that NCCL's profiler plugin recorded."""

    HAS_GPU_TIMES = 1  # start_ns and end_ns are known
    ON_HOST_CLOCK = 2  # the times are on the host's clock: when NCCL noticed begin and end
    IS_SEND = 4  # of a transfer over the network
    IS_PARTIAL = 8  # the times of a channel are missing
    IS_NETWORK = 16  # the part of an operation that a proxy exchanges with a peer
    IS_REPLAY = 32  # of a CUDA graph: ts_ns is when the GPU reached it; the host's call is not known


class OffCpuFlag(IntFlag):
    """Properties of one off-CPU interval."""

    PREEMPTED = 1  # it was still runnable when it left the CPU
    IOWAIT = 2  # in_iowait was set
    WOKEN_BY_CHILD = 4  # the waker is a child process
    WOKEN_BY_SELF = 8  # the waker is another thread of the same process
    THROTTLED = 16  # runnable, but the CPU quota of its control group was used up


class RequestFlag(IntFlag):
    """Properties of a request to an inference engine."""

    STREAMS = 1  # the response came in parts: each part is a token
    ABORTED = 2  # the connection was closed before the end of the response
    PIPELINED = 4  # it arrived before the end of the response to the request before it
    CLIENT_LEFT = 8  # the client closed its side before the end of the response
    UNANSWERED = 16  # no byte of the response was sent
    FAILED = 32  # a gRPC call failed, by its status


class Direction(IntEnum):
    """The direction of a copy: cudaMemcpyKind + 1, so that 0 is unknown, and the copy between devices."""

    NONE = 0
    HOST_TO_HOST = 1
    HOST_TO_DEVICE = 2
    DEVICE_TO_HOST = 3
    DEVICE_TO_DEVICE = 4
    BY_ADDRESS = 5  # the driver determines it from the addresses (cudaMemcpyDefault)
    PEER = 6  # from one device to another


class HostMemory(IntEnum):
    """The host memory of a copy. Copies from and to pageable memory are staged, and block the caller."""

    UNKNOWN = 0  # no host memory, or perhaps pinned before the capture began
    PAGEABLE = 1
    PINNED = 2  # by cudaHostAlloc, cudaMallocHost, cudaHostRegister or their driver equivalents


class MemoryKind(IntEnum):
    """The kind of allocation."""

    NONE = 0
    DEVICE = 1
    POOL = 2  # stream-ordered: cudaMallocAsync
    MANAGED = 3
    HOST = 4  # pinned host memory
    REGISTERED = 5  # the process's own memory, pinned
    VMM = 6  # physical memory by cuMemCreate
    ARRAY = 7


class SampleRole(IntEnum):
    """The reason for sampling a thread."""

    NONE = 0
    GPU = 1  # the most active GPU thread of the process: exactly one sample each time
    SAME_PROCESS = 2  # it runs, or woke the GPU thread last, while the GPU thread is blocked
    CHILD = 3  # main thread of a child process, while the GPU thread is blocked


class HostKind(IntEnum):
    """Events of the machine that affect a process."""

    NONE = 0
    THROTTLED = 1  # its control group had used up its CPU quota; value: periods, detail: the quota
    FILE_WAIT = 2  # a GPU thread waited for a file
    SOCKET_WAIT = 3  # a GPU thread waited on a socket; file: the other end; detail: its own port
    BLOCK_IO = 4  # a slow request to a disk; value: bytes, detail: kind of request
    MAJOR_FAULT = 5  # a GPU thread touched memory that had to be read from a disk
    RECLAIM = 6  # it had to free memory for an allocation; value: pages, or the number of short reclaims
    COMPACTION = 7  # it had to move pages together for an allocation
    OOM_KILL = 8  # the kernel killed it for lack of memory; by: the allocating process
    EXEC = 9  # it became another program
    FORK = 10  # its parent started it
    EXIT = 11  # it ended; value: exit code, or 128 + the signal
    SIGNAL = 12  # it was sent a signal that stops, continues or ends it; value: number
    RETRANSMIT = 13  # its connection sent segments again; value: number; file, detail: as in SOCKET_WAIT
    MIGRATION = 14  # its GPU threads were moved to other CPUs; value: number of moves
    DRIVER_CALL = 15  # a slow call into the GPU's driver; value: its result, detail: the ioctl


BY_SIGNAL = 128
"""The excess of an exit status over the number of the signal that ended the process (bash(1), EXIT STATUS)."""

SUMMED = (HostKind.THROTTLED, HostKind.RETRANSMIT, HostKind.MIGRATION)
"""Kinds that are counted, about once a second: `ts_ns` is the start of that second."""

LOWERED_POWER_LIMIT = 1 << 32
"""Set by the agent, not by the driver: the power limit is lower than the default limit of the GPU."""

CLOCK_REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    LOWERED_POWER_LIMIT: "power limit below the default",
}
"""Reasons for a GPU's present clock: nvmlClocksEventReason* in nvml.h, the same bits since driver 390."""


def word(enumeration: type[IntEnum], number: int) -> str:
    """The name of a number, or the number itself if a newer version wrote it."""
    try:
        return enumeration(number).name.lower()
    except ValueError:
        return str(number)
