"""The thresholds on which verdicts depend, each with its reason.

A constant that a single step of the diagnosis uses is at the top of the module of that step.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Thresholds:
    """The default thresholds; users change the thresholds of `UserThresholds` in the settings."""

    min_late_ns: int = 2_000_000
    """Lateness below this threshold is not reported: healthy 5 ms steps differ by up to 1.3 ms between ranks."""

    late_step_share: float = 0.05
    """... nor below this share of the typical step: the gain does not justify a repair."""

    noise_factor: float = 6.0
    """... nor below this many robust standard deviations of the normal differences between ranks."""

    steady_step_share: float = 0.03
    """Lower threshold for a rank that is slow in most steps: a median over steps is more reliable than one step."""

    steady_noise_factor: float = 3.0
    """... and its lateness exceeds this many robust standard deviations of one step."""

    even_share: float = 0.85
    """... or of the differences between all ranks, if in this share of the steps the rank is late by more than these
    differences, or by more than half of its own median lateness."""

    steady_share: float = 0.6
    """... in at least this share of the steps."""

    source_share: float = 0.5
    """A late rank is slow itself if its own excess explains this share of its lateness; otherwise it is a victim."""

    steady_steps: int = 8
    """... and only with this many examined steps: healthy hosts vary, and can be slow for a few steps."""

    min_late_steps: int = 3
    """A rank is named after this many late steps: one or two can be coincidence."""

    chance: float = 0.015
    """... if, at the rate of the other ranks, this many late steps have at most this probability (Poisson)."""

    clear_factor: float = 3.0
    """Late steps this many times above the threshold count separately; consecutive smaller late steps count once."""

    min_unclear_steps: int = 5
    """... and a rank needs this many of them to be named."""

    moving_time_share: float = 0.1
    """Delays of changing ranks are reported if together they took this share of the time."""

    min_uneven: int = 3
    """This many ranks, late in the same steps, have more work rather than faulty machines ..."""

    uneven_share: float = 0.3
    """... if they are this share of all, and not just the ranks of one node."""

    elongation: float = 0.3
    """Late steps must exceed the rank's other steps by this share of the lateness; otherwise it was absorbed."""

    shared_factor: float = 3.0
    """In a step with a pause of all ranks (a checkpoint), a rank is late from this multiple of the pause on."""

    one_off_ns: int = 1_000_000_000
    """A single delay of this length is not counted among the shorter delays of its rank."""

    incident_ns: int = 400_000_000
    """A single delay is reported from this length on ..."""

    incident_share: float = 0.05
    """... as a verdict if it took this share of the observed time, otherwise as a remark."""

    doubtful_share: float = 0.2
    """A single delay that took this share of the observed time makes the answer inconclusive where other ranks had
    such delays too."""

    cause_share: float = 0.8
    """A cause is certain when it explains this share of the excess."""

    absorbed_share: float = 0.5
    """Lateness of which the victims waited less than this share was absorbed and costs nothing."""

    min_cost_share: float = 0.01
    """Delays that may have cost nothing, and at most this share of the ranks' time, are a remark: the queues of the
    GPUs absorb most of them."""

    warm_up_steps: int = 3
    """Steps at the start that are never examined: compilers, caches, first use of communicators (200-300 ms)."""

    warm_up_factor: float = 3.0
    """Further steps at the start, up to ten, are warm-up while they take this many times the typical step."""

    hang_after_ns: int = 10_000_000_000
    """A missing rank is a hang after this time ..."""

    hang_gap_factor: float = 5.0
    """... and this many times the job's typical gap between rounds: a validation or a compilation is not a hang."""

    dead_after_ns: int = 1_000_000_000
    """A missing rank whose process has ended is a hang after this time."""

    imbalance_share: float = 0.15
    """A stage is slow when the others wait for it this share of every step."""

    late_factor_alone: float = 3.0
    """A process without peers is compared with its own better half: its steps differ by more than ranks do."""

    change_share: float = 0.05
    """A slowdown of the whole job is reported when its steps take this share longer until the end ..."""

    slowdown_factor: float = 1.1
    """... by at least half of `min_late_ns`, or by this factor where steps are short: the median of all ranks over ten
    steps or more varies far less than one step of one rank ..."""

    slowdown_steps: int = 10
    """... for at least this many steps, after the same number of steps at the earlier pace."""

    run_ahead_steps: int = 64
    """Steps in which no rank waited count as the earlier pace only if there are this many: until its launch queue
    (1,024 entries) is full, a host runs ahead of its GPU."""

    released_late_share: float = 0.03
    """A GPU is slow when its rank is released this share of a step after the others in four steps of five ..."""

    released_late_ns: int = 100_000
    """... and by at least this: healthy ranks are released within some ten microseconds of each other."""

    clock_error_factor: float = 2.0
    """Lateness below this many clock errors does not count."""

    fault_share: float = 0.1
    """A fault of a process without peers is named from this share of its wall-clock time on: a smaller fault is rarely
    worth a repair ..."""

    wait_share: float = 0.07
    """... and a wait for a disk, a lock, a program or the network from this share on: the time ledger is exact. The
    lower end of the share's 80 % interval must reach these limits ..."""

    overlap_share: float = 0.25
    """... and computing on the CPU this limit, where the GPU's driver does not report its busy time and ..."""

    overlap_wait_share: float = 0.5
    """... the process waits for its GPU for at least this share: a smaller part may overlap with the GPU's work."""

    busy_gpu_share: float = 0.85
    """Below this share of busy time a GPU waits for its host, so launches and small work are named."""

    healthy_gpu_share: float = 0.95
    """A process that keeps its GPU busy for this share of the time is healthy: its host cannot make it faster."""

    many_syncs_per_s: float = 100.0
    """From this rate on synchronise calls are counted as excessive if each is short and few launches lie between ..."""

    short_sync_us: float = 3_000.0
    """... at most this long on average: a longer wait is the GPU's own work ..."""

    launches_per_sync: float = 30.0
    """... and at most this many launches between two of them: a decoding step has hundreds ..."""

    working_sync_share: float = 0.7
    """... unless the GPU works for this share of the time while the host waits: the calls then cost little."""

    many_launches_per_s: float = 3_000.0
    """From this rate on a process may be bound by its launches ..."""

    launches_per_cpu_s: float = 12_000.0
    """... with this many launches per second on the CPU (an eager operation costs the host 5 to 40 us) ..."""

    launching_share: float = 0.5
    """... and it is on the CPU for this share of the time."""

    slowed_clock_share: float = 0.95
    """A thermal or hardware slowdown, or a lowered power limit, is named where the clock is below this share of its
    maximum. A power cap at the default limit is not named: dense matrix products reach it."""

    whole_round_share: float = 0.8
    """The answer is healthy only if at least this share of the rounds is matched on all members ..."""

    hidden_step_share: float = 1.5
    """... and the clocks hide no lateness of more than this share of a step: smaller delays show in the ranks' self
    times, which need no common clock ..."""

    lost_share: float = 0.05
    """... and at most this share of the records was lost by the capture, or left out by the reader of a source."""

    job_share: float = 0.3
    """A category other than computing or waiting for GPUs in which all ranks spend this share of their time is pointed
    out: without it the job would be 1.4 times as fast."""

    critical_share: float = 0.3
    """Severity: critical where a fault costs at least this share of the job's GPU time, and where the job hangs ..."""

    high_share: float = 0.1
    """... high from this share on ..."""

    medium_share: float = 0.03
    """... medium from this share on, low below ..."""

    firm_confidence: float = 0.7
    """... and one level lower where the confidence is below this."""

    idle_after_ns: int = 300_000_000_000
    """GPUs held without use are a verdict after this time: pauses between cells of a notebook are shorter."""

    late_request_factor: float = 4.0
    """A part of a request is late from this multiple of the typical time on: other batches double or triple it."""

    late_request_ns: int = 100_000_000
    """... and by at least this time: users notice delays from about 0.1 s on."""

    min_late_requests: int = 3
    """Late requests are explained from this number on: one or two can be coincidence."""

    late_request_share: float = 0.01
    """... and if their delays are at least this share of the time of all requests."""

    min_requests: int = 20
    """An engine with fewer requests is not evaluated: the typical time of a request is not known."""

    dead_server_ns: int = 5_000_000_000
    """An engine without progress for this time, and for three times its longest pause before, no longer answers."""


class UserThresholds(Protocol):
    """The thresholds that users choose, with the names of the settings."""

    @property
    def min_late_ms(self) -> float: ...
    @property
    def min_late_steps(self) -> int: ...
    @property
    def cause_share(self) -> float: ...
    @property
    def hang_after_s(self) -> float: ...
    @property
    def hang_gap_factor(self) -> float: ...
    @property
    def idle_after_s(self) -> float: ...


def thresholds_of(chosen: UserThresholds) -> Thresholds:
    """The thresholds from the current settings, for explain, the hub, the live page and the tools."""
    return Thresholds(
        min_late_ns=int(chosen.min_late_ms * 1e6),
        min_late_steps=chosen.min_late_steps,
        cause_share=chosen.cause_share,
        hang_after_ns=int(chosen.hang_after_s * 1e9),
        hang_gap_factor=chosen.hang_gap_factor,
        idle_after_ns=int(chosen.idle_after_s * 1e9),
    )
