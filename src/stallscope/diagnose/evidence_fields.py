"""The facts behind a verdict and behind each of its causes, under the names that they have as `evidence` in JSON.

Every field is optional: None means that the fact does not apply or is not known, and JSON leaves it out. A new fact
needs a line here, and its value where the verdict or the cause is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")

_OLD_NAMES = {
    "error_text": "said",
    "requested_bytes": "asked_bytes",
    "exit_requested_by": "asked_by",
    "standstill_state": "stands",
    "typical_step_ms": "step_ms_usual",
    "typical_mhz": "usual_mhz",
}
"""Names of the previous release by their names now: JSON has both until the next release."""


@dataclass(frozen=True)
class RankActivity:
    """The last known state of a rank that its peers wait for."""

    rank: int | None = None
    is_alive: bool | None = None
    has: str | None = (
        None  # not_entered, not_started, not_completed, idle, no_dump: where the source states it
    )
    failed_call: str | None = None  # the last call, if it failed
    error: int | None = None  # of the failed call
    exit_status: int | None = None  # as in a shell
    oom_killed: bool | None = None
    ended_by: str | None = None  # the signal that ended the process, and its sender
    exit_requested_by: str | None = None  # the signal after which the process exited itself, and its sender
    has_hung: bool | None = None  # the process hung before it ended
    pid: int | None = None
    standstill_state: str | None = (
        None  # waits, elsewhere or unknown, in a hang that began before the capture
    )
    state: str | None = None  # category of the time ledger
    stopped_by: str | None = None  # the signal that stopped the process, and its sender
    syscall_nr: int | None = None
    in_call: str | None = None  # the CUDA or NCCL operation
    at: str | None = None  # the innermost frame of the user's code
    stack: list[str] | None = None  # innermost frame first
    last_call: str | None = None  # the last collective, with its line of code


@dataclass(frozen=True)
class JobSpan:
    """The job of a verdict, in a trace with several jobs. since, until: ISO 8601."""

    number: int
    of: int
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True)
class RoundCall:
    """The call with which a rank entered a round."""

    rank: int
    op: str
    count: int
    datatype: int


@dataclass(frozen=True)
class StackLocation:
    """Ranks with the same innermost frame of their own code. waits: in a collective, or for the GPU."""

    ranks: list[int]
    at: str
    waits: bool


@dataclass(frozen=True)
class LaterFailure:
    """A rank that failed after the first one."""

    rank: int
    error: int | None = None
    after_ms: float | None = None
    stated: str | None = None


@dataclass(frozen=True)
class ClaimingProcess:
    """A process that claims the same rank as another process."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class RequestPart:
    """A part of the late time of the requests of a verdict: mean per request."""

    part: str  # client, front_end, hand_over, queue, prefill, decode
    ms: float
    pid: int | None = None  # the process that held the requests for most of it
    states: Mapping[str, float] | None = None  # of its threads, by category of the time ledger: ms


@dataclass(frozen=True)
class VerdictEvidence:
    """The facts behind a verdict."""

    job: JobSpan | None = None

    # Late steps
    n_late_steps: int | None = None
    n_steps: int | None = None  # examined
    step_ms: float | None = None  # typical
    slowdown: float | None = None  # time of the steps / longest possible time without the loss
    first_step: int | None = None
    last_step: int | None = None
    is_one_off: bool | None = None
    is_whole_node: bool | None = None  # all ranks of the nodes are named
    at: str | None = None  # the innermost frame of the user's code
    stack: list[str] | None = None  # innermost frame first
    late_steps_by_rank: Mapping[str, int] | None = None
    moves: bool | None = None  # the late rank changes
    on: str | None = None  # "the GPUs": the delays are not on the hosts
    more_work: list[int] | None = None  # ranks with more work than the others
    slow_stage: list[int] | None = None  # ranks of the pipeline stage with more work
    wait_share: float | None = None  # part of a step or of the time in which the other stages or ranks wait
    suspects: list[int] | None = (
        None  # suspected ranks; the data does not suffice to name one of them as the culprit
    )
    times_as_long: float | None = None  # collectives or transfers of a slow link, relative to similar ones
    link_states: list[str] | None = (
        None  # of suspected GPUs, where the driver's readings differ from other GPUs'
    )
    sends: list[str] | None = None  # slow connections of the network, by the ranks at their ends

    # A change of the whole job's speed
    step_ms_before: float | None = None
    step_ms_after: float | None = None
    host_share: float | None = None  # part of the growth that is on the hosts
    from_step: int | None = None
    grew_ms: Mapping[str, float] | None = None  # by category of the time ledger, per step
    lowered_clocks: list[str] | None = None  # of GPUs, since the change, with the driver's reasons

    # A standstill
    doing: list[RankActivity] | None = None  # of the ranks that the others wait for
    waited_s: float | None = None
    n_ranks: int | None = None
    is_circle: bool | None = None  # the ranks wait for each other in collectives of different communicators
    crossed_order: bool | None = None  # the ranks entered two communicators' rounds in another order
    captured_late: bool | None = None  # the standstill began before the capture
    ahead: list[int] | None = None  # ranks in a round after the other ranks' last
    left_no_dump: list[int] | None = None
    by_stacks: bool | None = None  # the verdict rests on one dump of the stacks
    others_at: str | None = None  # the line at which the other ranks wait
    stack_groups: list[StackLocation] | None = None
    operation: str | None = None  # of the round
    group: str | None = None  # of the round, as the framework names it
    line: str | None = None  # of the call in which the others wait, or of a process's largest fault
    calls: list[RoundCall] | None = None  # of each member of a mismatched round

    # A failure
    pid: int | None = None
    error: int | None = None  # result of the failed call
    error_text: str | None = None  # the meaning of the error
    function: str | None = None
    n_failed_calls: int | None = None
    requested_bytes: int | None = None  # of an allocation that failed
    also_failed_later: list[LaterFailure] | None = None
    stated: str | None = None  # the words of a log
    statements: list[str] | None = None
    n_failures: int | None = None
    failed_ranks: list[int] | None = None
    exit_status: int | None = None  # as in a shell
    oom_killed: bool | None = None
    ended_by: str | None = None  # the signal that ended the process, and its sender
    exit_requested_by: str | None = None  # the signal after which the process exited itself, and its sender
    failed_call: str | None = None  # before the end of the process

    # A process without peers
    command: str | None = None
    share: float | None = None  # of its time, in the largest fault or item
    gain_at_most: float | None = None  # times faster without the fault
    gpu_busy: float | None = None  # share of its time
    largest_item: str | None = None  # of its time budget
    typical_step_ms: float | None = None
    step_ms_late: float | None = None
    in_gpu_calls_share: float | None = None  # of the late steps

    # Requests to an inference engine
    engine: str | None = None
    model: str | None = None
    endpoint: str | None = None  # path of the request with the largest delay
    part: str | None = None  # pickup, first, gap: the late part of most late requests
    n_late_requests: int | None = None
    n_requests: int | None = None  # examined; of a dead server: open
    n_late_clients: int | None = (
        None  # clients (addresses) with a late request; not stated for fewer than 5 clients
    )
    n_clients: int | None = (
        None  # of the examined requests, since the start of the agent with the most late clients
    )
    parts: list[RequestPart] | None = None  # of the late time, in the order of the path
    n_spans: int | None = None  # of the late requests that have a span of the engine
    engine_ms: Mapping[str, float] | None = None  # queue, prefill, decode, first, whole: means of these spans
    recorded_ms: Mapping[str, float] | None = None  # first, whole: means of the same requests as recorded

    # Several processes with the same rank
    claimed_ranks: list[int] | None = None
    processes: list[ClaimingProcess] | None = None

    # GPUs that are held without use
    holder: str | None = None  # kind and number: job 4711, pod train-0, pid 4711
    idle_gpus: list[str] | None = None  # as the scheduler names them
    idle_because: str | None = None
    idle_s: float | None = None  # of the first GPU


@dataclass(frozen=True)
class CauseEvidence:
    """The facts behind a cause, in the order in which a report lists them."""

    # A hang: the same as in the verdict
    doing: list[RankActivity] | None = None
    waited_s: float | None = None
    is_circle: bool | None = None

    # Where the time went in the code
    line: str | None = None  # of the user's code
    gain_at_most: float | None = None  # times faster without the cause
    n_samples: int | None = None
    parts: list[str] | None = None  # of the time, with their shares
    at: str | None = None  # the innermost frame of the user's code
    share_of_line: float | None = None  # part of the time in that line
    cpu_wait: float | None = None  # part of the share in which the thread waited for a CPU
    work: str | list[str] | None = None  # kinds of work that took longer

    # Time off the CPU, and slow calls
    n_intervals: int | None = None
    n_slow_calls: int | None = None
    longest_ms: float | None = None
    functions: list[str] | None = None
    system_calls: list[int] | None = None
    n_extra_calls: int | None = None  # beyond the peers'
    n_extra_launches: int | None = None
    n_launches: int | None = None  # beyond the peers'
    n_extra_syncs: int | None = None
    n_extra_syncs_per_step: int | None = None

    # The CPU
    by: list[str] | None = None  # tasks that took the CPU
    quota: str | None = None
    control_group: str | None = None
    stopped_by: list[str] | None = None  # senders of the signals
    n_stops: int | None = None

    # Files and memory
    serialise_ms: float | None = None
    copy_ms: float | None = None
    write_ms: float | None = None
    file: str | None = None
    files: list[str] | None = None
    devices: list[str] | None = None
    written_by: list[str] | None = None
    n_major_faults: int | None = None
    lock: str | None = None
    reclaim_ms: float | None = None
    compaction_ms: float | None = None

    # The network
    peer: str | None = None
    peers: list[str] | None = None
    n_retransmits: int | None = None
    to: list[str] | None = None
    interfaces: list[str] | None = None

    # Other processes and threads
    until_it_ended: bool | None = None  # the rank waited for the end of a program
    n_loader_workers: int | None = None
    loader_cpu_share: float | None = None
    n_workers: int | None = None
    workers: list[str] | None = None  # states of the workers, with their shares
    program: str | None = None
    reader: str | None = None  # of a full pipe
    holder: str | None = None  # of the interpreter lock
    waits_at: str | None = None
    other_thread: str | None = None
    n_seconds_with_compilation: int | None = None

    # CUDA calls of a process
    calls_per_second: float | None = None
    copies_per_second: float | None = None
    gb_per_second: float | None = None
    syncs_per_second: float | None = None
    mean_us: float | None = None
    launches_per_second: int | None = None

    # The GPU and its driver
    seen_by: str | None = None  # the observation that shows a slow GPU
    before_replays: bool | None = None  # of a CUDA graph, by a source that does not show the host's calls
    excess_ms_quartiles: list[float] | None = None
    ioctls: list[str] | None = None
    xid: list[int] | None = None
    uncorrected_memory_errors: int | None = None
    also_on_this_gpu: list[str] | None = None
    unlike_other_gpus: list[str] | None = (
        None  # readings of the driver that differ from the other ranks' GPUs
    )
    gpu_readings: list[str] | None = None  # the driver's other readings of the GPU at the time of the verdict
    clock_held_by: list[str] | None = None
    clock_mhz: int | None = None
    typical_mhz: int | None = None
    pcie_lanes: int | None = None  # in use
    pcie_max_lanes: int | None = None
    reason: str | None = None  # for a low clock
    share_of_time: float | None = None
    others: list[str] | None = None  # processes on the GPU
    busy_for_others: float | None = None
    gpu_busy: float | None = None
    sm_active: float | None = None  # share of the multiprocessors at work

    # A failed call
    error: str | None = None
    function: str | None = None


def merged(first: Facts, *others: Facts) -> Facts:
    """The known facts of several structs of a type; the last struct wins where several know a fact."""
    for other in others:
        known = {name: value for name, value in vars(other).items() if value is not None}
        first = replace(first, **known)
    return first


def as_json(evidence: "DataclassInstance") -> dict[str, object]:
    """The known facts by name, as plain lists and dicts."""
    values = ((field.name, getattr(evidence, field.name)) for field in fields(evidence))
    known = {name: _plain(value) for name, value in values if value is not None}
    return known | {old: known[new] for new, old in _OLD_NAMES.items() if new in known}


def without_old_names(evidence: Any) -> Any:
    """Evidence from JSON, each fact once: under its name of this release, if it has that name."""
    if isinstance(evidence, list):
        return [without_old_names(entry) for entry in evidence]
    if not isinstance(evidence, Mapping):
        return evidence
    old_names = {old for new, old in _OLD_NAMES.items() if new in evidence}
    return {name: without_old_names(value) for name, value in evidence.items() if name not in old_names}


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(value)
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
