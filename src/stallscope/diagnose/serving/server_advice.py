"""Advice on the causes of late requests. The causes' own advice is about ranks of a job."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence, RequestPart

_MOSTLY = 0.5  # share of the late time

_ADVICE = {
    "host_compute": (
        "Move this work out of the loop that serves the requests: into a thread pool or another process.",
    ),
    "host_sleep": ("Remove the sleep, the retry or the rate limit from the code that serves the requests.",),
    "block_io": (
        "Load adapters and weights before the server takes requests, or in a thread of their own.",
        "Compare the latency of the disk with another host (iostat -x 1).",
    ),
    "page_fault": (
        "Check the memory pressure of the host and of the control group of the server (memory.pressure), and swap.",
    ),
    "cpu_preemption": (
        "Give the server dedicated CPUs (taskset, cpuset, a CPU manager policy), or move the other programs.",
    ),
    "process_stopped": (
        "Find out what stops the process: a debugger or profiler, a scheduler that suspends jobs, a frozen cgroup.",
    ),
    "lock_contention": (
        "Check the other threads of the process: a logger or a background thread may hold the lock.",
        "`py-spy dump --pid PID` during a delay shows the thread that holds it.",
    ),
    "recompilation": (
        "Send a request of each shape and option before the server takes load, and cache the compiled code.",
    ),
    "file_lock": (
        "Do not share a locked file between processes on the path of a request, or lock it for less time.",
    ),
    "network_wait": (
        "Find the service at the other end: a store, a transfer of the KV cache. Set a timeout for its answers.",
    ),
    "child_program": ("Start the program before the server takes requests, or in a thread of its own.",),
    "unknown": ("Trace the server with stacks, and check the logs of the host at these times.",),
}
_FRONT_END = (
    "Most of the late time is in the front end: the engine reports less than the client measures. Start more API "
    "servers (vLLM: --api-server-count), and move tokenizers, JSON and logs out of their event loop."
)


def advice(cause: Cause, evidence: CauseEvidence, parts: list[RequestPart] | None) -> list[str]:
    """The advice for an operator of the server. parts: of the late time."""
    own = _ADVICE.get(cause.name)
    out = list(own) if own else cause.advice(evidence)
    times_ms = {each.part: each.ms for each in parts or []}
    is_of_code = cause.name in ("host_compute", "host_sleep", "gil", "full_pipe")
    if is_of_code and times_ms.get("front_end", 0.0) > _MOSTLY * sum(times_ms.values()):
        out.append(_FRONT_END)
    return out
