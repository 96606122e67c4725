"""Flight-recorder dumps become a trace, the blocking rank is named, and no file can do harm."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.diagnose.report.verdict import Report
from stallscope.errors import BadTrace, NotFound
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import CollectiveFlag, Datatype, Op
from stallscope.importers import importer_for
from stallscope.importers.flight_recorder import IMPORTER
from stallscope.importers.plain_pickle import plain
from stallscope.store import node

from ..diagnose.reports import report_of
from .dumped_job import BEGAN_NS, Job, dumps, same_stage, write


def explained(folder: Path) -> Report:
    """The report on a folder of dumps, through the importer that sniffs it and through a stored trace."""
    importer = importer_for(folder)
    assert importer is IMPORTER
    trace = importer.read(folder)
    report = report_of(trace)
    db = folder.with_suffix(".db")
    node.write(db, trace)
    assert report_of(node.read(db)).verdicts == report.verdicts
    return report


def named(report: Report) -> set[int]:
    assert all(verdict.kind == "hang" for verdict in report.verdicts)
    return {rank for verdict in report.verdicts for rank in verdict.ranks}


@pytest.mark.shared
@pytest.mark.parametrize(("name", "ranks"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_the_ranks_of_a_real_hang_are_named(shared: Path, tmp_path: Path, name: str, ranks: set[int]):
    trace = IMPORTER.read(shared / "public" / "flight-recorder" / name)
    node.write(tmp_path / "trace.db", trace)
    (verdict,) = report_of(node.read(tmp_path / "trace.db")).verdicts
    assert (verdict.kind, set(verdict.ranks)) == ("hang", ranks)
    assert set(verdict.victims) == set(range(16)) - ranks


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_1st"])
def test_real_dumps_read_the_same_as_with_the_unpickler_of_python(shared: Path, name: str):
    class Refusing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"asked for {module}.{name}")

    for file in (shared / "public" / "flight-recorder" / name).iterdir():
        with file.open("rb") as stream:
            assert plain(file.read_bytes(), file.name) == Refusing(stream).load()


def copy_without(lost: set[int], dumps: Path, to: Path) -> None:
    """Copy the dumps of all ranks but these."""
    for file in dumps.iterdir():
        if int(file.name.removeprefix("_dump_")) not in lost:
            (to / file.name).write_bytes(file.read_bytes())


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "lost", "ranks"),
    [
        ("lock_gil_1st", {9, 14}, {9, 14}),
        ("gpu_error_1st", {12}, {12, 14}),
        ("gpu_error_1st", {12, 14}, {12, 14}),
    ],
)
def test_a_rank_that_was_killed_is_named_by_its_missing_dump(
    shared: Path, tmp_path: Path, name: str, lost: set[int], ranks: set[int]
):
    copy_without(lost, shared / "public" / "flight-recorder" / name, tmp_path)
    (verdict,) = report_of(IMPORTER.read(tmp_path)).verdicts
    assert set(verdict.ranks) == ranks
    assert verdict.confidence == 0.7


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "lost", "ranks"),
    [
        *(("lock_gil_1st", lost, {9, 14}) for lost in ({0}, {3}, {13}, {13, 15}, {0, 1, 2, 3})),
        *(("gpu_error_1st", lost, {12, 14}) for lost in ({0}, {3}, {13}, {8, 9})),
        ("lock_gil_1st", {14}, {9}),  # the waits would be the same had any other dump been lost instead
    ],
)
def test_a_rank_without_a_dump_is_not_named_if_others_explain_the_waits(
    shared: Path, tmp_path: Path, name: str, lost: set[int], ranks: set[int]
):
    copy_without(lost, shared / "public" / "flight-recorder" / name, tmp_path)
    (verdict,) = report_of(IMPORTER.read(tmp_path)).verdicts
    assert set(verdict.ranks) == ranks
    assert verdict.evidence.left_no_dump == sorted(lost)
    assert "no dump was left" in verdict.summary


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_1st"])
@pytest.mark.parametrize("lost", [{0, 12}, {4, 13}, {3, 14}, {14, 15}, {7, 13}])
def test_ranks_of_two_lost_dumps_are_not_named_next_to_known_culprits(
    shared: Path, tmp_path: Path, name: str, lost: set[int]
):
    copy_without(lost, shared / "public" / "flight-recorder" / name, tmp_path)
    (verdict,) = report_of(IMPORTER.read(tmp_path)).verdicts
    assert verdict.ranks
    assert set(verdict.ranks) <= ({12, 14} if name == "gpu_error_1st" else {9, 14})
    assert verdict.evidence.left_no_dump == sorted(lost)


@pytest.mark.shared
@pytest.mark.parametrize("length", [0, 1, 700, -1])
def test_a_dump_that_was_cut_off_is_as_good_as_none(shared: Path, tmp_path: Path, length: int):
    for file in (shared / "public" / "flight-recorder" / "gpu_error_1st").iterdir():
        whole = file.read_bytes()
        (tmp_path / file.name).write_bytes(whole[:length] if file.name == "_dump_5" else whole)
    trace = IMPORTER.read(tmp_path)
    (verdict,) = report_of(trace).verdicts
    assert (set(verdict.ranks), verdict.evidence.left_no_dump) == ({12, 14}, [5])
    assert trace.source.startswith("PyTorch flight-recorder dumps of 15 of 16 ranks")


def test_a_single_truncated_dump_is_an_error(tmp_path: Path):
    folder = write(tmp_path / "dumps", {3: dumps(Job())[3]})
    (folder / "_dump_3").write_bytes((folder / "_dump_3").read_bytes()[:-100])
    with pytest.raises(BadTrace, match="copy it again"):
        IMPORTER.read(folder)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "ranks"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_the_ranks_of_a_real_hang_are_named_without_counters(
    shared: Path, tmp_path: Path, name: str, ranks: set[int]
):
    """Formats before 2.2 have no pg_status; the complete calls follow from the first incomplete call."""
    for file in (shared / "public" / "flight-recorder" / name).iterdir():
        output = plain(file.read_bytes(), file.name)
        del output["pg_status"]
        for entry in output["entries"]:
            entry["seq_id"] = entry.pop("collective_seq_id")
            del entry["p2p_seq_id"], entry["is_p2p"]
        (tmp_path / file.name).write_bytes(pickle.dumps(output, 2))
    (verdict,) = report_of(IMPORTER.read(tmp_path)).verdicts
    assert (verdict.kind, set(verdict.ranks)) == ("hang", ranks)


def test_a_host_that_stops_calling_is_named(tmp_path: Path):
    job = Job(host_stops={3: 12})
    report = explained(write(tmp_path / "dumps", dumps(job)))
    assert named(report) == {3}
    (verdict,) = report.verdicts
    assert verdict.causes[0].cause.name == "missing_rank"
    assert set(verdict.victims) <= set(range(8)) - {3} and verdict.victims
    assert verdict.cost is None  # the file does not state how long the job hung


def test_a_rank_that_does_not_complete_the_calls_of_its_peers_is_named(tmp_path: Path):
    job = Job(host_stops={5: 16}, reports_until={5: 11})
    report = explained(write(tmp_path / "dumps", dumps(job)))
    assert named(report) == {5}
    assert "not completed" in report.verdicts[0].summary


def test_a_rank_with_fewer_completed_calls_is_named_with_the_stopped_rank(
    tmp_path: Path,
):
    job = Job(tensor=2, data=2, pipeline=1, host_stops={0: 16}, reports_until={0: 11, 2: 12})
    assert named(explained(write(tmp_path / "dumps", dumps(job)))) == {0, 2}


def test_dumps_that_mostly_lag_are_from_different_moments_and_only_calls_count(tmp_path: Path):
    job = Job(host_stops={3: 16}, reports_until={0: 10, 1: 9, 2: 8, 4: 8, 5: 9})
    assert named(explained(write(tmp_path / "dumps", dumps(job)))) == {3}


def test_a_rank_that_waits_for_an_earlier_stage_is_a_victim(tmp_path: Path):
    job = Job(tensor=2, data=1, pipeline=4, host_stops={0: 12})
    report = explained(write(tmp_path / "dumps", dumps(job)))
    assert named(report) == {0}
    assert report.verdicts[0].victims == [1, 2, 3, 4, 5, 6, 7]


def test_a_stage_that_only_sends_and_receives_is_named_when_it_stops(tmp_path: Path):
    job = Job(tensor=1, data=1, pipeline=4, host_stops={1: 14})
    report = explained(write(tmp_path / "dumps", dumps(job)))
    assert named(report) == {1}


def test_a_gpu_that_does_not_start_the_calls_of_its_peers_is_named(tmp_path: Path):
    job = Job(tensor=4, data=1, pipeline=1, gpu_stops={2: 12}, tells_starts=True)
    report = explained(write(tmp_path / "dumps", dumps(job)))
    assert named(report) == {2}


@pytest.mark.parametrize(
    ("job", "stops", "has_counters"),
    [
        (Job(gpu_stops={5: 18}), {5}, True),  # in a receive: its peers have started later calls than it
        (Job(tensor=1, data=3, pipeline=2, gpu_stops={5: 34}), {5}, False),
        (Job(tensor=1, data=4, pipeline=1, gpu_stops={1: 12}), {1}, False),
        (Job(tensor=1, data=1, pipeline=4, gpu_stops={3: 9}), {3}, True),
        (Job(tensor=1, data=8, pipeline=1, gpu_stops={0: 30, 1: 30}, left_none={7}), {0, 1}, True),
    ],
)
def test_only_the_gpu_that_starts_no_calls_is_named_while_others_wait(
    tmp_path: Path, job: Job, stops: set[int], has_counters: bool
):
    output = dumps(replace(job, n_steps=8, tells_starts=True))
    for dump in output.values():
        if not has_counters:
            del dump["pg_status"]
    assert named(explained(write(tmp_path / "dumps", output))) == stops


def test_no_rank_is_named_when_all_have_entered_and_starts_are_unknown(tmp_path: Path):
    job = Job(tensor=4, data=1, pipeline=2, gpu_stops={2: 12})
    (verdict,) = explained(write(tmp_path / "dumps", dumps(job))).verdicts
    assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
    assert 2 in verdict.evidence.suspects
    assert verdict.abstained_because


def test_ranks_without_a_dump_are_not_accused_when_most_are_missing(tmp_path: Path):
    output = dumps(Job(host_stops={3: 12}, left_none={3, 4, 5, 6, 7}))
    report = explained(write(tmp_path / "dumps", output))
    assert not named(Report("", {}, [v for v in report.verdicts if v.kind == "hang"])) & {3, 4, 5, 6, 7}


def test_a_job_without_waiting_ranks_is_healthy(tmp_path: Path):
    assert explained(write(tmp_path / "dumps", dumps(Job()))).healthy


def test_a_rank_that_enters_a_round_with_a_different_size_is_a_mismatch(tmp_path: Path):
    output = dumps(Job(tensor=4, data=1, pipeline=1, host_stops={0: 14}))
    entry = next(e for e in output[2]["entries"] if e["profiling_name"] == "nccl:_all_gather_base")
    entry["input_sizes"] = [[7, 8]]
    report = explained(write(tmp_path / "dumps", output))
    assert [verdict.ranks for verdict in report.verdicts if verdict.kind == "mismatch"] == [[2]]


@settings(max_examples=60)
@given(data=st.data())
def test_exactly_the_stopped_ranks_are_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    tensor, n_data, pipeline = (data.draw(st.integers(1, high)) for high in (4, 3, 4))
    job = Job(
        tensor=tensor, data=n_data, pipeline=pipeline, n_steps=8, keeps_complete=data.draw(st.booleans())
    )
    if job.n_ranks < 3:
        return
    first = data.draw(st.integers(0, job.n_ranks - 1))
    peers = same_stage(job, first, range(job.n_ranks))
    guilty = {first, data.draw(st.sampled_from(peers))}
    at = data.draw(st.integers(8, len(job.program(first)) - 15))  # the others come to wait for them
    kind = data.draw(st.sampled_from(["lock", "killed", "gpu"]))
    job.host_stops = dict.fromkeys(guilty, at)
    if len(guilty) * 2 > job.n_ranks:
        return
    if kind == "gpu" and len(guilty) == len(peers):
        return  # no rank in their groups is ahead of them: nothing distinguishes them
    if kind == "killed":
        job.left_none = set(guilty)
    if kind == "gpu":
        # So far back that a call with all ranks of the stage is among them.
        job.reports_until = dict.fromkeys(guilty, at - data.draw(st.integers(5, 6)))
    folder = tmp_path_factory.mktemp("hang") / "dumps"
    output = dumps(job)
    if job.keeps_complete and kind != "killed" and data.draw(st.booleans()):
        for dump in output.values():
            del dump["pg_status"]  # formats before 2.2
    report = report_of(IMPORTER.read(write(folder, output, protocol=data.draw(st.sampled_from([2, 4])))))
    assert named(report) == guilty, (job, report.verdicts)


def test_the_trace_has_the_contents_of_the_dumps(tmp_path: Path):
    job = Job(host_stops={3: 12})
    output = dumps(job)
    trace = IMPORTER.read(write(tmp_path / "dumps", output))
    entry = output[0]["entries"][-1]
    row = trace.collectives[trace.collectives["pid"] == 0][-1]
    assert row["ts_ns"] == entry["time_created_ns"]
    assert row["seq"] == entry["collective_seq_id"]
    assert Op(int(row["op"])).name.lower() in entry["profiling_name"]
    assert (row["datatype"], row["flags"]) == (
        Datatype.BFLOAT16,
        CollectiveFlag.NO_LEDGER | CollectiveFlag.OPEN,
    )
    assert len(trace.communicators) == sum(len(members) for members in job.groups().values())
    default = trace.communicators[trace.communicators["nranks"] == job.n_ranks]
    assert (default["comm_rank"] == default["pid"]).all()
    assert trace.processes["rank"].tolist() == list(range(job.n_ranks))
    (clock,) = trace.clocks
    assert (
        clock.monotonic_ns
        == clock.wall_ns
        == max(e["time_created_ns"] for d in output.values() for e in d["entries"])
    )
    assert clock.wall_ns > BEGAN_NS


def test_a_group_has_one_hash_on_all_ranks_and_groups_differ(tmp_path: Path):
    job = Job()
    trace = IMPORTER.read(write(tmp_path / "dumps", dumps(job)))
    members: dict[int, list[int]] = {}
    for row in trace.communicators:
        members.setdefault(int(row["comm_hash"]), []).append(int(row["pid"]))
    assert sorted(sorted(m) for m in members.values()) == sorted(job.groups().values())


def test_a_rank_without_a_dump_is_a_process_without_a_snapshot(tmp_path: Path):
    trace = IMPORTER.read(write(tmp_path / "dumps", dumps(Job(host_stops={3: 12}, left_none={3}))))
    assert 3 in trace.processes["rank"]
    assert 3 not in trace.snapshots["pid"]
    assert (trace.communicators["last_entered"][trace.communicators["pid"] == 3] == UNKNOWN).all()


def test_one_file_alone_is_read(tmp_path: Path):
    folder = write(tmp_path / "dumps", dumps(Job(host_stops={3: 12})))
    trace = importer_for(folder / "_dump_5").read(folder / "_dump_5")
    assert set(trace.collectives["pid"].tolist()) == {5}


def test_files_that_are_not_dumps_are_skipped(tmp_path: Path):
    folder = write(tmp_path / "dumps", dumps(Job(host_stops={3: 12})))
    (folder / "README.txt").write_text("notes")
    (folder / "empty_9").write_bytes(b"")
    assert len(IMPORTER.read(folder).processes) == 8


def test_a_batch_of_sends_is_not_a_round_of_its_group(tmp_path: Path):
    output = dumps(Job(tensor=1, data=1, pipeline=4, host_stops={1: 14}))
    batch = next(e for e in output[0]["entries"] if e["is_p2p"])
    output[0]["entries"].append(batch | {"profiling_name": "nccl:coalesced", "collective_seq_id": 26})
    assert named(explained(write(tmp_path / "dumps", output))) == {1}


def test_values_nested_too_deeply_to_print_are_one_clear_line(tmp_path: Path):
    nested = b"]\x940" + b"0".join(b"](h%ch%ce\x94" % (i, i) for i in range(60))
    data = b"\x80\x04}(\x8c\x07entries]\x8c\x0cnccl_version" + nested + b"u."
    (tmp_path / "_dump_0").write_bytes(data)
    with pytest.raises(BadTrace, match="nccl_version is a list"):
        IMPORTER.read(tmp_path)


def test_dumps_of_older_formats_are_read(tmp_path: Path):
    output = dumps(Job(host_stops={3: 12}))
    for dump in output.values():
        del dump["pg_status"], dump["nccl_version"]
        for entry in dump["entries"]:
            entry["seq_id"] = entry.pop("collective_seq_id")
            del entry["retired"], entry["p2p_seq_id"]
    assert named(explained(write(tmp_path / "dumps", output))) == {3}


def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda dump: dump["entries"][0].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        changed(collective_seq_id="many"),
        changed(collective_seq_id=1 << 80),
        changed(collective_seq_id=-5),
        changed(time_created_ns=-(1 << 70)),
        changed(time_created_ns=2.5),
        changed(input_sizes=[[[]]]),
        changed(input_sizes=[["a"]]),
        changed(input_sizes=[[1 << 60]]),
        changed(process_group=({}, [])),
        changed(profiling_name=[]),
        changed(state={}),
        lambda dump: dump.update(entries=[1]),
        lambda dump: dump.update(entries={}),
        lambda dump: dump.update(pg_config=[]),
        lambda dump: dump.update(pg_config={"0": 1}),
        lambda dump: dump["pg_config"]["0"].update(ranks="[0, 0]"),
        lambda dump: dump["pg_config"]["0"].update(ranks="__import__('os')"),
        lambda dump: dump["pg_config"]["0"].update(ranks=[-1]),
    ],
)
def test_a_field_that_makes_no_sense_is_one_clear_line(tmp_path: Path, change: Callable[[Any], None]):
    output = dumps(Job(host_stops={3: 12}))
    change(output[5])
    with pytest.raises(BadTrace) as caught:
        IMPORTER.read(write(tmp_path / "dumps", output))
    assert "_dump_5" in str(caught.value) and "\n" not in str(caught.value)


def test_two_overlapping_dumps_of_one_rank_are_an_error(tmp_path: Path):
    output = dumps(Job(host_stops={3: 12}))
    folder = write(tmp_path / "dumps", output)
    (folder / "copy_5").write_bytes(pickle.dumps(output[5], 2))
    with pytest.raises(BadTrace, match="both belong to rank 5 and overlap"):
        IMPORTER.read(folder)


def test_the_groups_of_a_dump_are_believed_before_its_name(tmp_path: Path):
    output = dumps(Job(host_stops={3: 12}))
    output[99] = output.pop(5)
    folder = write(tmp_path / "dumps", output)
    assert set(IMPORTER.read(folder).snapshots["pid"].tolist()) == set(range(8))
    output[99]["pg_config"] = {"0": output[99]["pg_config"]["0"]}
    for entry in output[99]["entries"]:
        entry["process_group"] = ("0", "default_pg")
    write(folder, output)
    with pytest.raises(BadTrace, match="contains no rank of its process groups"):
        IMPORTER.read(folder)


class Evil:
    """Unpickling this the usual way makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_dump_is_never_run(tmp_path: Path, protocol: int):
    mark = tmp_path / "was-here"
    evil = {"entries": [Evil(mark)], "nccl_version": "2"}
    pickle.loads(pickle.dumps(evil, protocol))
    assert mark.exists()
    mark.unlink()
    with pytest.raises(BadTrace, match="contains code to run"):
        IMPORTER.read(write(tmp_path / "dumps", dumps(Job()) | {5: evil}, protocol=protocol))
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n(U\x04true\x85R.",  # GLOBAL, REDUCE
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02(ios\nsystem\n.",  # INST
        b"\x80\x02}}b.",  # BUILD
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pname\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"(dp0\nS'entries'\n.",  # protocol 0
        b"\x80\x02.",
        b"\x80\x02}(.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x02h\x05.",  # from an empty memo
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # longer than the file
        b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",  # no UTF-8
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\x02]",
    ],
)
def test_a_pickle_of_something_else_is_refused(data: bytes):
    with pytest.raises(BadTrace) as caught:
        plain(data, "file")
    assert "\n" not in str(caught.value)


_BOMBS = {
    "marks": b"(" * 30_000_000,
    "lists": b"]" * 30_000_000,
    "memo": b"]" + b"\x94" * 30_000_000,
    "tuples": b")" + b"\x85" * 3_000_000,
    "a far memo": b"]r\xff\xff\xff\x7fe",
    "doubling": b"]\x94"
    + b"".join(b"](h" + bytes([i]) * 1 + b"h" + bytes([i]) + b"e\x94" for i in range(200)),
}


@pytest.mark.parametrize("name", _BOMBS)
def test_a_small_file_cannot_take_much_memory_or_time(tmp_path: Path, name: str):
    (tmp_path / "_dump_0").write_bytes(b"\x80\x04" + _BOMBS[name] + b"nccl_version.")
    script = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from stallscope.errors import BadTrace\n"
        "from stallscope.importers.flight_recorder import IMPORTER\n"
        "try: IMPORTER.read(Path(sys.argv[1]))\n"
        "except BadTrace as error: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "_dump_0")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().isdigit(), done.stderr
    assert int(done.stdout) < 1 << 20  # KiB


_DUMP = pickle.dumps(dumps(Job(host_stops={3: 12}))[3 - 3], 2)


@settings(max_examples=300)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(_DUMP) - 1), st.binary(min_size=0, max_size=6), st.integers(0, 8)),
        max_size=6,
    )
)
def test_a_damaged_dump_is_an_error_or_a_trace(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, bytes, int]]
):
    data = _DUMP
    for at, put, n_removed in cuts:
        data = data[:at] + put + data[at + n_removed :]
    file = tmp_path_factory.mktemp("damaged") / "_dump_0"
    file.write_bytes(data)
    try:
        trace = IMPORTER.read(file)
    except BadTrace as error:
        assert "\n" not in str(error)
    else:
        report_of(trace)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=True)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(where=st.integers(0, 30), value=_VALUES)
def test_a_field_with_any_value_is_an_error_or_a_trace(
    tmp_path_factory: pytest.TempPathFactory, where: int, value: Any
):
    dump = dumps(Job(host_stops={3: 12}))[0]
    indexes: list[tuple[Any, Any]] = [(dump, key) for key in dump]
    indexes += [(dump["entries"][0], key) for key in dump["entries"][0]]
    indexes += [(dump["pg_config"]["0"], key) for key in dump["pg_config"]["0"]]
    indexes += [(dump["pg_status"]["0"], key) for key in dump["pg_status"]["0"]]
    holder, key = indexes[where % len(indexes)]
    holder[key] = value
    file = tmp_path_factory.mktemp("odd") / "_dump_0"
    file.write_bytes(pickle.dumps(dump, 4))
    try:
        trace = IMPORTER.read(file)
    except BadTrace as error:
        assert "\n" not in str(error)
    else:
        report_of(trace)


def test_a_path_without_dumps_has_no_importer(tmp_path: Path):
    (tmp_path / "_dump_0").write_bytes(b"nothing of this kind")
    with pytest.raises(BadTrace, match="contains no file that can be imported"):
        importer_for(tmp_path)
    with pytest.raises(NotFound):
        importer_for(tmp_path / "absent")
