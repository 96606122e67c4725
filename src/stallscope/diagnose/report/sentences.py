"""The answer of a verdict in one or two sentences."""

from stallscope.diagnose.causes import Explained, leading
from stallscope.diagnose.report.hang_sentences import failure_sentence, hang_sentence, round_text
from stallscope.diagnose.report.phrases import identity_text, ms_text, name_text, ranks_text, short_frame
from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.counted import counted

_MAX_RANKS = 12


def summary(verdict: Verdict) -> str:
    """One or two sentences: the rank, its lateness, how often, and the cause."""
    sentences = {
        "straggler": _straggler,
        "device": _device,
        "process": _process,
        "failure": failure_sentence,
        "hang": hang_sentence,
        "mismatch": _mismatch,
        "imbalance": _imbalance,
        "change": _change,
        "link": _link,
        "idle": _idle,
        "inconclusive": _inconclusive,
        "latency": _latency,
        "dead_server": _dead_server,
    }
    return sentences[verdict.kind](verdict)


def _idle(verdict: Verdict) -> str:
    evidence, name = verdict.evidence, verdict.owner.get("job_name")
    gpus = counted(len(evidence.idle_gpus or ()), "GPU")
    of_job = f" ({name})" if name else ""
    user = f" of {verdict.owner['user']}" if verdict.owner.get("user") else ""
    where = f" on {', '.join(verdict.nodes)}" if verdict.nodes else ""
    minutes = (evidence.idle_s or 0.0) / 60
    long = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return (
        f"{evidence.holder}{of_job}{user} has held {gpus}{where} without use for {long}: "
        f"{evidence.idle_because}."
    )


def _straggler(verdict: Verdict) -> str:
    if stated := verdict.evidence.stated:
        return f"{ranks_text(verdict.ranks).capitalize()} is slower than the others: {stated}."
    late = f"{ms_text(verdict.late_ms['median'])} late" if verdict.late_ms else "late"
    is_plural = len(verdict.ranks) > 1 and len(verdict.nodes) > 1
    verb = "slow down" if is_plural else "slows down"
    return f"{_subject(verdict)} {verb} the job: {late} {_how_often(verdict)}{_because(verdict)}."


def _subject(verdict: Verdict) -> str:
    """The rank with its host and process, or the nodes whose ranks are all named."""
    if len(verdict.ranks) > 1:
        named = ", ".join(verdict.nodes[:4]) + (
            f" and {len(verdict.nodes) - 4} more" if verdict.nodes[4:] else ""
        )
        ranks = (
            f"{len(verdict.ranks)} ranks" if len(verdict.ranks) > _MAX_RANKS else ranks_text(verdict.ranks)
        )
        return f"Node{'s' if len(verdict.nodes) > 1 else ''} {named} ({ranks})"
    return f"Rank {verdict.ranks[0]}{identity_text(verdict)}"


def _because(verdict: Verdict) -> str:
    states = [part.state for part in leading(verdict.causes)]
    return f", {' and '.join(states)}" if states else ""


def _how_often(verdict: Verdict) -> str:
    if verdict.evidence.is_one_off:
        return "once"
    if verdict.period_steps:
        return f"every {verdict.period_steps} steps"
    return f"in {verdict.evidence.n_late_steps} of {verdict.evidence.n_steps} steps"


_STATES_OF_A_GPU = {
    "gpu_slow": "slower than the other GPUs",
    "gpu_shared": "at irregular speed, as if another process shared it",
    "gpu_throttled": "at a reduced clock",
}
"""The states of causes in a sentence about a GPU instead of a rank."""


def _state_of_a_gpu(part: Explained) -> str:
    if part.cause.name == "gpu_shared" and part.evidence.others:
        return f"shared with {', '.join(part.evidence.others[:3])}"
    return _STATES_OF_A_GPU.get(part.cause.name, part.state)


def _device(verdict: Verdict) -> str:
    held = verdict.causes[0].evidence if verdict.causes else None
    if held and held.clock_held_by and verdict.late_ms is None:
        return (
            f"The GPU of {ranks_text(verdict.ranks)}{identity_text(verdict)} runs at {held.clock_mhz} MHz instead of "
            f"{held.typical_mhz} MHz, held down by {', '.join(held.clock_held_by)}; the other ranks wait for it."
        )
    late = f"{ms_text(verdict.late_ms['median'])} late" if verdict.late_ms else "late"
    states = [_state_of_a_gpu(part) for part in leading(verdict.causes)]
    because = f", {' and '.join(states)}" if states else ""
    return (
        f"The GPU of {ranks_text(verdict.ranks)}{identity_text(verdict)} slows down the job: {late} "
        f"{_how_often(verdict)}{because}."
    )


def _process(verdict: Verdict) -> str:
    facts = verdict.evidence
    where = f" on {', '.join(verdict.nodes)}" if any(verdict.nodes) else ""
    if (gain := facts.gain_at_most) is not None and verdict.causes:
        at = short_frame(facts.line or "")
        line = f", at {at}" if at.strip() and at not in verdict.causes[0].title else ""
        waits = verdict.causes[0].evidence.cpu_wait
        of_cpu = f", including {waits:.0%} in which it waits for a CPU" if waits else ""
        return (
            f"Process {facts.pid} ({facts.command}){where} {verdict.causes[0].title}{line}: "
            f"{facts.share:.0%} of its time{of_cpu}; at most {gain:.1f} times faster without it."
        )
    return (
        f"Process {facts.pid} ({facts.command}){where} keeps its GPU waiting: "
        f"{facts.n_late_steps} of {facts.n_steps} steps take {_ms_of(facts.step_ms_late)} "
        f"instead of {_ms_of(facts.typical_step_ms)}{_because(verdict)}."
    )


def _ms_of(value: float | None) -> str:
    return "some time" if value is None else ms_text(value)


_DELAYED_BEFORE = {
    "pickup": "before the server reads them",
    "first": "before their first token",
    "gap": "between two tokens",
}


def _latency(verdict: Verdict) -> str:
    facts = verdict.evidence
    late = f"delayed by {ms_text(verdict.late_ms['median'])}" if verdict.late_ms else "delayed"
    name = f"{facts.engine} (model {facts.model})" if facts.model else facts.engine
    clients = f", of {facts.n_late_clients} of {facts.n_clients} clients," if facts.n_clients else ""
    head = (
        f"{facts.n_late_requests} of {facts.n_requests} requests to {name}{clients} are {late} "
        f"{_DELAYED_BEFORE[facts.part or 'first']}"
    )
    if verdict.abstained_because:
        return f"{head}: {verdict.abstained_because}."
    if not facts.pid:
        return f"{head}: their clients read data slowly; the server is healthy."
    name_of_cause = verdict.causes[0].cause.name if verdict.causes else ""
    if name_of_cause == "capacity":
        return f"{head}: load beyond capacity, no fault{_rate(verdict)}."
    at = f" at {short_frame(facts.line)}" if facts.line else ""
    title = verdict.causes[0].cause.title if verdict.causes else "delayed them"
    return f"{head}: process {facts.pid}{_command_of(facts.command)} {title}{at}."


def _rate(verdict: Verdict) -> str:
    rate = verdict.causes[0].evidence.calls_per_second
    return f"; the engine answers {rate:g} requests per second" if rate else ""


def _command_of(command: str | None) -> str:
    return f" ({command})" if command else ""


def _dead_server(verdict: Verdict) -> str:
    facts = verdict.evidence
    reason = {
        "process_stopped": "it is stopped",
        "lock_contention": "it waits for a lock",
    }.get(verdict.causes[0].cause.name if verdict.causes else "", "it is blocked")
    at = f" at {short_frame(facts.line)}" if facts.line else ""
    return (
        f"Process {facts.pid}{_command_of(facts.command)} of {facts.engine} has not answered {facts.endpoint} for "
        f"{facts.waited_s} s, with {facts.n_requests} open requests: {reason}{at}."
    )


def _mismatch(verdict: Verdict) -> str:
    return (
        f"{ranks_text(verdict.ranks).capitalize()} entered {round_text(verdict)} with a different operation, size or "
        f"type than the other ranks{_since_then(verdict)}."
    )


def _since_then(verdict: Verdict) -> str:
    waited = verdict.evidence.waited_s
    return f"; since then the job has made no progress for {waited} s" if waited is not None else ""


def _imbalance(verdict: Verdict) -> str:
    if stage := verdict.evidence.slow_stage:
        extra = ms_text(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no faulty machine: the stage of {ranks_text(stage)} works {extra} longer per step, "
            "and the others wait for it."
        )
    if more := verdict.evidence.more_work:
        extra = ms_text(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no faulty machine: {ranks_text(more)} {'works' if len(more) == 1 else 'work'} {extra} "
            f"longer {_how_often(verdict)}, and the others wait."
        )
    return (
        f"Uneven work, no faulty machine: in {verdict.evidence.n_late_steps} of "
        f"{verdict.evidence.n_steps} steps a rank is late, and the late rank changes."
    )


def _inconclusive(verdict: Verdict) -> str:
    if verdict.evidence.largest_item:
        because = verdict.abstained_because
        return (
            f"Process {verdict.evidence.pid} has no known fault, but the data does not show that it is healthy: "
            f"{because}."
        )
    if verdict.cost is None and verdict.evidence.suspects and verdict.late_ms is None:
        return f"The job has stopped making calls, and no rank can be named: {verdict.abstained_because}."
    if verdict.cost is None and verdict.late_ms is None:
        return f"No rank can be named: {verdict.abstained_because}."
    return f"The job is slowed down, but no rank can be named: {verdict.abstained_because}."


def _change(verdict: Verdict) -> str:
    """The whole job became slower: when, by how much, and which part of the step grew."""
    facts = verdict.evidence
    before, after = facts.step_ms_before or 0.0, facts.step_ms_after or 0.0
    parts = [f"{name_text(name)} +{ms_text(ms)}" for name, ms in (facts.grew_ms or {}).items()]
    growth = f" ({', '.join(parts)} per step)" if parts else ""
    return (
        f"The whole job became {after / before - 1:.0%} slower at step {verdict.evidence.from_step}: steps "
        f"take {ms_text(after)} instead of {ms_text(before)}{growth}. No rank is to blame: {verdict.abstained_because}."
    )


def _link(verdict: Verdict) -> str:
    if verdict.evidence.sends:
        return _network(verdict)
    suspects, times = verdict.evidence.suspects, verdict.evidence.times_as_long
    ranks = ranks_text(suspects) if suspects else "a group of ranks"
    more = f", {ms_text(verdict.late_ms['median'])} more in" if verdict.late_ms else " in"
    return (
        f"The collectives of {ranks} take {times} times as long on their GPUs as similar collectives{more} each of "
        f"{verdict.evidence.n_late_steps} steps: {verdict.abstained_because}."
    )


def _network(verdict: Verdict) -> str:
    """Slow transfers of NCCL's proxies: the rank with the slow interface, or the ends of the slow path."""
    facts = verdict.evidence
    more_ms = ms_text((verdict.late_ms or {}).get("median", 0.0))
    in_rounds = f"in {facts.n_late_steps} of {counted(facts.n_steps or 0, 'collective')}"
    if verdict.ranks:
        where = f" ({location})" if (location := ", ".join(verdict.nodes)) else ""
        subject = f"The network interface of {ranks_text(verdict.ranks)}{where} is slow: its transfers"
    else:
        subject = f"The network between {ranks_text(facts.suspects or [])} is slow: transfers"
    return (
        f"{subject} take {facts.times_as_long} times as long as other transfers, {more_ms} more {in_rounds}."
    )
