"""Timelines contain the data of the trace, in valid formats of other tools."""

import json
from collections import defaultdict
from dataclasses import dataclass, replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallscope.diagnose.engine import diagnose
from stallscope.events import layout
from stallscope.events.names import Category, HostKind, Op
from stallscope.events.trace import Clock, Trace
from stallscope.exporters.chrome import chrome_json
from stallscope.exporters.perfetto import perfetto_bytes
from stallscope.exporters.timeline_builder import build_track_set
from stallscope.exporters.trace_context import trace_context
from stallscope.exporters.track_layout import track_rows
from stallscope.exporters.tracks import Slice, TrackSet
from stallscope.query.wire_format import together

from ..diagnose.builders import MS, Gone, dp_trace, every
from ..diagnose.slack import slack_trace

pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


@pytest.fixture(scope="module")
def late() -> Trace:
    """Rank 2 sleeps 50 ms every 7 steps."""
    return dp_trace(every(2, 7, 50 * MS))


def track_set_of(trace: Trace) -> TrackSet:
    return build_track_set(trace, diagnose(trace))


@dataclass
class Read:
    """A Perfetto file as a reader takes it apart. slices: (begin, end, name, arguments) by path of the track."""

    slices: dict[tuple[str, ...], list[tuple[int, int, str, dict[str, object]]]]
    counters: dict[tuple[str, ...], list[tuple[int, float]]]
    arrows: dict[int, list[tuple[tuple[str, ...], int]]]
    clocks: dict[int, int]


def read(data: bytes) -> Read:
    """Follows the rules of the format; fails on events out of order and slices that are not closed."""
    packets = pb.Trace.FromString(data).packet
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in packets if p.HasField("track_descriptor")}
    names, arguments = {}, {}
    result = Read(defaultdict(list), defaultdict(list), defaultdict(list), {})
    begun: dict[int, list[int]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    assert packets[0].sequence_flags == pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    result.clocks = {clock.clock_id: clock.timestamp for clock in packets[0].clock_snapshot.clocks}

    def path(uuid: int) -> tuple[str, ...]:
        parent = tracks[uuid].parent_uuid
        return (*(path(parent) if parent else ()), tracks[uuid].name)

    for packet in packets:
        names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
        arguments |= {entry.iid: entry.name for entry in packet.interned_data.debug_annotation_names}
        if not packet.HasField("track_event"):
            continue
        event, at = packet.track_event, packet.timestamp
        assert at >= last[event.track_uuid]
        last[event.track_uuid] = at
        where = path(event.track_uuid)
        for arrow in event.flow_ids:
            result.arrows[arrow].insert(0, (where, at))
        for arrow in event.terminating_flow_ids:
            result.arrows[arrow].append((where, at))
        if event.type == event.TYPE_COUNTER:
            assert tracks[event.track_uuid].HasField("counter")
            result.counters[where].append((at, event.double_counter_value))
        elif event.type == event.TYPE_SLICE_END:
            begin = begun[event.track_uuid].pop()
            result.slices[where][begin] = (
                *result.slices[where][begin][:1],
                at,
                *result.slices[where][begin][2:],
            )
        else:
            values = {
                arguments[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations
            }
            if event.type == event.TYPE_SLICE_BEGIN:
                begun[event.track_uuid].append(len(result.slices[where]))
            result.slices[where].append((at, at, names[event.name_iid], values))
    assert not any(begun.values())
    return result


def test_every_arrival_is_a_slice_in_the_track_of_its_process(late):
    trace = read(b"".join(perfetto_bytes(track_set_of(late))))
    for rank in range(4):
        own = late.collectives[late.collectives["pid"] == 1000 + rank]
        drawn = [
            entry
            for path, slices in trace.slices.items()
            for entry in slices
            if path[:2] == ("host-a", f"rank {rank}: pid {1000 + rank}")
            and path[2].startswith("communicator")
        ]
        assert [begin for begin, *_ in drawn] == own["ts_ns"].tolist()
        assert [values["round"] for *_, values in drawn] == own["seq"].tolist()
        assert {name for _, _, name, _ in drawn} == {"all_reduce"}


def test_a_collective_lasts_until_its_last_rank_has_come(late):
    rows = late.collectives
    last = {seq: rows["ts_ns"][rows["seq"] == seq].max() for seq in np.unique(rows["seq"]).tolist()}
    trace = read(b"".join(perfetto_bytes(track_set_of(late))))
    for path, slices in trace.slices.items():
        for begin, end, _, values in slices:
            if path[-1].startswith("communicator"):
                following = [b for b, *_ in slices if b > begin]
                assert end == max(min([last[values["round"]], *following[:1]]), begin)


def test_an_arrow_leads_from_the_late_arrival_to_each_release(late):
    trace = read(b"".join(perfetto_bytes(track_set_of(late))))
    assert trace.arrows
    for ends in trace.arrows.values():
        (source, at), (target, released) = ends
        assert source[1].startswith("rank 2")
        assert not target[1].startswith("rank 2")
        assert target[-1] == "waits"
        assert released >= at
    n_delays = len(every(2, 7, 50 * MS))
    assert len(trace.arrows) == 3 * n_delays


def test_the_verdict_is_a_slice_over_its_time(late):
    report = diagnose(late)
    trace = read(b"".join(perfetto_bytes(build_track_set(late, report))))
    ((begin, end, name, values),) = trace.slices["verdicts",]
    assert name == "straggler rank 2"
    assert values["summary"] == report.verdicts[0].summary
    assert end - begin == report.verdicts[0].until_ns - report.verdicts[0].since_ns
    wall = trace.clocks[1] + begin - trace.clocks[3]
    assert wall == report.verdicts[0].since_ns
    assert values["gpu_seconds"] == report.verdicts[0].cost.gpu_seconds
    assert "at_most_gpu_seconds" not in values


def test_the_slice_of_a_verdict_has_both_ends_of_its_cost():
    trace = slack_trace()
    report = diagnose(trace)
    values = read(b"".join(perfetto_bytes(build_track_set(trace, report)))).slices["verdicts",][0][3]
    cost = report.verdicts[0].cost
    ends = cost.gpu_seconds, cost.at_most_gpu_seconds
    assert ends[0] < ends[1] and (values["gpu_seconds"], values["at_most_gpu_seconds"]) == ends


def test_the_same_trace_gives_the_same_bytes(late):
    assert b"".join(perfetto_bytes(track_set_of(late))) == b"".join(perfetto_bytes(track_set_of(late)))
    assert "".join(chrome_json(track_set_of(late))) == "".join(chrome_json(track_set_of(late)))


def with_records(trace: Trace) -> Trace:
    """A call that lasted, one that is open, and an interval off the CPU, on process 1000."""
    begin = int(trace.collectives["ts_ns"].min())
    calls, away = layout.empty(layout.CALLS, 2), layout.empty(layout.OFFCPU, 1)
    calls["ts_ns"], calls["duration_ns"] = (begin + 10 * MS, begin + 40 * MS), (5 * MS, -1)
    calls["pid"] = calls["tid"] = away["pid"] = away["tid"] = 1000
    calls["op"], calls["symbol"] = (Op.ALLOC, Op.SYNC), (1, 0)
    away["ts_ns"], away["duration_ns"], away["category"] = begin + 20 * MS, 3 * MS, Category.PREEMPTED
    away["by_pid"], away["by_comm"] = 77, b"hog"
    return replace(trace, calls=calls, offcpu=away, symbols=("", "cudaMalloc"))


def test_calls_and_time_off_the_cpu_lie_on_their_thread(late):
    trace = with_records(late)
    begin = int(trace.collectives["ts_ns"].min())
    result = read(b"".join(perfetto_bytes(track_set_of(trace))))
    thread = ("host-a", "rank 0: pid 1000", "thread 1000")
    finished, still_open = result.slices[thread]
    assert finished[:3] == (begin + 10 * MS, begin + 15 * MS, "cudaMalloc")
    assert still_open[2:] == ("sync", {"is_open": True})
    assert still_open[1] == trace.ends_ns[0]
    away = result.slices[(*thread[:2], "thread 1000 off CPU")]
    assert away == [(begin + 20 * MS, begin + 23 * MS, "preempted", {"cpu_went_to": "hog 77"})]


def test_counters_follow_the_ledger(late):
    before, after = late.snapshots[:1].copy(), late.snapshots[:1].copy()
    before["ts_ns"], after["ts_ns"] = 10**9, 2 * 10**9
    after["ledger_ns"][0, Category.ON_CPU - 1] = before["ledger_ns"][0, Category.ON_CPU - 1] + 250 * MS
    before["n_collectives"], after["n_collectives"] = 10, 30
    trace = read(
        b"".join(perfetto_bytes(track_set_of(replace(late, snapshots=np.concatenate([before, after])))))
    )
    own = ("host-a", "rank 0: pid 1000")
    assert trace.counters[(*own, "on_cpu")] == [(2 * 10**9, 25.0)]
    assert trace.counters[(*own, "collectives")] == [(10**9, 10.0), (2 * 10**9, 30.0)]


def test_nodes_with_the_same_process_numbers_stay_apart_and_share_a_clock():
    job = {"n_ranks": 4, "node": (0, 0, 1, 1), "offset_ns": (0, 80 * MS)}
    trace = dp_trace(every(2, 7, 50 * MS), **job)
    for name in ("collectives", "processes", "snapshots"):
        getattr(trace, name)["pid"] = 1000 + getattr(trace, name)["pid"] % 2
    result = read(b"".join(perfetto_bytes(track_set_of(trace))))
    paths = {path[:2] for path in result.slices if len(path) > 2}
    assert paths == {(f"host-{'ab'[rank // 2]}", f"rank {rank}: pid {1000 + rank % 2}") for rank in range(4)}
    first = [slices[0][0] for path, slices in sorted(result.slices.items()) if path[-1].startswith("comm")]
    assert max(first) - min(first) < 5 * MS


def test_a_rank_that_hangs_leaves_the_others_waiting_to_the_end():
    trace = dp_trace(gone=(Gone(1, 30),), quiet_ns=60_000 * MS)
    result = read(b"".join(perfetto_bytes(track_set_of(trace))))
    ends = {
        path[1][:6]: slices[-1][1]
        for path, slices in result.slices.items()
        if path[-1].startswith("communicator")
    }
    assert {rank for rank, end in ends.items() if end == trace.ends_ns[0]} >= {"rank 0", "rank 2", "rank 3"}


def test_an_empty_trace_has_tracks():
    assert track_set_of(dp_trace(n_steps=0)).tracks


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_overlapping_slices_are_all_drawn_and_nest_on_every_line(spans):
    lines = track_rows([Slice(at, took, "x") for at, took in spans])
    assert sorted((entry.ts_ns, entry.duration_ns) for line in lines for entry in line) == sorted(spans)
    for line in lines:
        for i, a in enumerate(line):
            for b in line[i + 1 :]:
                a_end, b_end = a.ts_ns + a.duration_ns, b.ts_ns + b.duration_ns
                assert a.ts_ns <= b.ts_ns
                assert b.ts_ns >= a_end or b_end <= a_end


NUMBER = {"type": "number", "minimum": 0}
EVENT = {
    "M": {
        "name": {"enum": ["process_name", "thread_name", "process_sort_index"]},
        "args": {"type": "object"},
    },
    "X": {"name": {"type": "string"}, "ts": NUMBER, "dur": NUMBER, "args": {"type": "object"}},
    "C": {"name": {"type": "string"}, "ts": NUMBER, "args": {"additionalProperties": NUMBER}},
    "s": {"id": {"type": "integer"}, "ts": NUMBER, "cat": {"type": "string"}, "name": {"type": "string"}},
    "f": {"id": {"type": "integer"}, "ts": NUMBER, "cat": {"type": "string"}, "bp": {"const": "e"}},
}
"""The part of the Trace Event Format in use: the required fields of each phase."""
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "items": {
                "required": ["ph", "pid", "tid"],
                "properties": {
                    "ph": {"enum": list(EVENT)},
                    "pid": {"type": "integer"},
                    "tid": {"type": "integer"},
                },
                "allOf": [
                    {
                        "if": {"properties": {"ph": {"const": phase}}},
                        "then": {"required": list(wanted), "properties": wanted},
                    }
                    for phase, wanted in EVENT.items()
                ],
            }
        },
    },
}


def test_the_chrome_file_is_as_the_format_wants_it(late):
    trace = with_records(late)
    events = json.loads("".join(chrome_json(track_set_of(trace))))
    jsonschema.validate(events, SCHEMA)
    by_phase = defaultdict(list)
    for event in events["traceEvents"]:
        by_phase[event["ph"]].append(event)
    assert {e["id"] for e in by_phase["s"]} == {e["id"] for e in by_phase["f"]} != set()
    arrivals = sorted(e["ts"] for e in by_phase["X"] if e["name"] == "all_reduce")
    assert arrivals == sorted((trace.collectives["ts_ns"] / 1000).tolist())
    names = {e["args"]["name"] for e in by_phase["M"] if e["name"] == "process_name"}
    assert names == {"verdicts", "host-a", *(f"host-a rank {rank}: pid {1000 + rank}" for rank in range(4))}
    drawn = {(e["pid"], e["tid"]) for e in by_phase["X"]}
    assert drawn == {(e["pid"], e["tid"]) for e in by_phase["M"] if e["name"] == "thread_name"}


def test_a_label_is_a_slice_until_the_next_label_of_its_kind(late):
    begin = int(late.collectives["ts_ns"].min())
    rows = layout.empty(layout.ANNOTATIONS, 4)
    rows["ts_ns"] = begin + MS * np.array([0, 100, 200, 50])
    rows["pid"], rows["label"] = (1000, 1000, 1000, 0), (b"step", b"step", b"phase", b"epoch")
    rows["value"] = (b"7", b"8", b"", b"3")
    trace = read(b"".join(perfetto_bytes(track_set_of(replace(late, annotations=rows)))))
    own = ("host-a", "rank 0: pid 1000")
    end = late.ends_ns[0]
    assert [entry[:3] for entry in trace.slices[(*own, "step")]] == [
        (begin, begin + 100 * MS, "step 7"),
        (begin + 100 * MS, end, "step 8"),
    ]
    assert (*own, "phase") not in trace.slices
    assert trace.slices["host-a", "epoch"][0][:3] == (begin + 50 * MS, end, "epoch 3")


def test_host_events_of_a_process_have_a_track(late: Trace):
    rows = layout.empty(layout.HOST_EVENTS, 3)
    rows["pid"], rows["ts_ns"] = late.processes["pid"][2], late.collectives["ts_ns"][40]
    rows["kind"] = [HostKind.SIGNAL, HostKind.FILE_WAIT, HostKind.THROTTLED]
    rows["tid"], rows["by_pid"], rows["by_comm"] = [7, 7, 0], [9, -1, -1], [b"bash", b"", b""]
    rows["duration_ns"], rows["file"], rows["value"] = [-1, 5 * MS, MS], [b"", b"/data/x", b""], [19, -1, 3]
    tracks = [
        track for track in track_set_of(replace(late, host_events=rows)).tracks if track.name == "machine"
    ]
    result = [(entry.name, entry.duration_ns, entry.arguments) for track in tracks for entry in track.slices]
    assert result == [
        ("file_wait", 5 * MS, {"file": "/data/x"}),
        ("signal", 0, {"by": "bash 9", "value": 19}),
    ]


def test_nodes_that_only_a_probe_ties_share_a_clock():
    ahead_ns = 80 * MS
    jobs = [dp_trace(every(2, 7, 50 * MS)), dp_trace(every(2, 7, 50 * MS), offset_ns=(ahead_ns,))]
    for table in (jobs[1].collectives, jobs[1].communicators):  # another job, which never meets the first one
        table["comm_hash"] += 1
    both = together([replace(job, nodes=(name,)) for job, name in zip(jobs, "ab", strict=True)])
    further_ns = ahead_ns + 5 * MS  # the captures end together on clocks that are 80 ms apart
    probed = tuple(Clock(node, node * further_ns, 0, 1000) for node in range(2))

    def begins(trace):
        context = trace_context(trace)
        return [
            int(context.common_ns(node, trace.collectives["ts_ns"][trace.collectives["node"] == node]).min())
            for node in range(2)
        ]

    apart, tied = begins(replace(both, clocks=())), begins(replace(both, clocks=(), probed=probed))
    assert abs(apart[1] - apart[0]) <= 1
    assert abs(tied[1] - tied[0] + 5 * MS) <= 1


def with_gpus(trace: Trace) -> Trace:
    """Two GPUs and a partition of the second in two readings; in the second the clock of the first GPU is unknown."""
    begin_ns = int(trace.collectives["ts_ns"].min())
    rows = layout.empty(layout.GPUS, 6)
    rows["ts_ns"] = begin_ns + np.repeat([0, 100 * MS], 3)
    rows["gpu"], rows["mig"] = [0, 1, 1] * 2, [-1, -1, 7] * 2
    rows["utilization_percent"], rows["sm_mhz"] = [90, 80, -1, 10, 20, -1], [1980, 1200, -1, -1, 1210, -1]
    rows["memory_used_bytes"] = np.arange(1, 7) << 30
    counters = layout.empty(layout.GPU_COUNTERS, 1)
    counters["gpu"], counters["sm_percent"] = 1, 35
    counters["ts_ns"], counters["interval_ns"] = begin_ns + 100 * MS, 100 * MS
    return replace(trace, gpus=rows[::-1], gpu_counters=counters)


def test_gpu_states_are_counters_of_their_node(late: Trace):
    trace = with_gpus(late)
    first_ns, second_ns = sorted(set(trace.gpus["ts_ns"].tolist()))
    counters = read(b"".join(perfetto_bytes(track_set_of(trace)))).counters
    gpus = {path[1]: samples for path, samples in counters.items() if len(path) == 2}
    assert {path[0] for path in counters if len(path) == 2} == {trace.nodes[0]}
    assert gpus == {
        "GPU 0 utilisation": [(first_ns, 90.0), (second_ns, 10.0)],
        "GPU 0 memory used": [(first_ns, float(1 << 30)), (second_ns, float(4 << 30))],
        "GPU 0 SM clock": [(first_ns, 1980.0)],
        "GPU 1 utilisation": [(first_ns, 80.0), (second_ns, 20.0)],
        "GPU 1 memory used": [(first_ns, float(2 << 30)), (second_ns, float(5 << 30))],
        "GPU 1 SM clock": [(first_ns, 1200.0), (second_ns, 1210.0)],
        "GPU 1 MIG 7 memory used": [(first_ns, float(3 << 30)), (second_ns, float(6 << 30))],
        "GPU 1 multiprocessors at work": [(first_ns, 35.0)],
    }


def test_counters_of_gpus_are_in_the_chrome_file(late: Trace):
    trace = with_gpus(late)
    events = json.loads("".join(chrome_json(track_set_of(trace))))["traceEvents"]
    clock = [event for event in events if event["ph"] == "C" and event["name"] == "GPU 1 SM clock"]
    assert [event["args"] for event in clock] == [{"MHz": 1200.0}, {"MHz": 1210.0}]
    (node,) = {event["pid"] for event in clock}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == node] == [
        trace.nodes[0]
    ]
    assert [event["ts"] * 1000 for event in clock] == sorted(set(trace.gpus["ts_ns"].tolist()))


def test_a_node_of_which_only_its_gpus_are_known_is_drawn():
    trace = with_gpus(dp_trace())
    answer, track, *counters = track_set_of(Trace(gpus=trace.gpus, nodes=("alone",))).tracks
    assert answer.name == "verdicts"
    assert track.name == "alone" and len(counters) == 7
    assert all(counter.parent == track.number for counter in counters)
