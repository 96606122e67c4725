"""Communicators made from others, groups that are not run, calls that are not rounds: real probes."""

import ctypes
from collections.abc import Callable

import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.process.comm_grow import GrownCommunicators
from stallscope.capture.rows import records
from stallscope.events.kernel import Kind
from stallscope.events.layout import Array
from stallscope.events.names import Op

from ..patience import until

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

ID, NEW_ID = bytes(range(1, 129)), bytes(range(128, 0, -1))
ALL_REDUCE = "lib.ncclAllReduce(P(0), P(0), Z(16), 7, 0, comm({}), P(0))"


def init(name: str, rank: int, nranks: int = 4, unique_id: bytes = ID) -> str:
    return f"{name} = P(); lib.ncclCommInitRank(ctypes.byref({name}), {nranks}, Id({unique_id!r}), {rank})"


def shrink(parent: str, name: str, *excluded: int) -> str:
    array = f"(ctypes.c_int * {len(excluded)})(*{excluded})"
    return (
        f"{name} = P(); lib.ncclCommShrink(comm({parent}), {array}, {len(excluded)}, "
        f"ctypes.byref({name}), P(0), 0)"
    )


def grow(parent: str, name: str, *, rank: int = -1, unique_id: bytes = b"", nranks: int = 4) -> str:
    given = f"ctypes.byref(Id({unique_id!r}))" if unique_id else "P(0)"
    return f"{name} = P(); lib.ncclCommGrow({parent}, {nranks}, {given}, {rank}, ctypes.byref({name}), P(0))"


def told(program: Program, pid: int) -> tuple[Array, Array]:
    """Arrivals and communicators of one process."""
    arrivals, events = program.arrivals.drain(), program.events.drain()
    born = records.of_kind(events, Kind.COMM_BORN)
    return arrivals[arrivals["pid"] == pid], born[born["pid"] == pid]


def test_a_shrunk_communicator_is_one_for_all_that_stay(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init("first", 0),
        init("third", 2),
        shrink("first", "a", 1, 3),
        shrink("third", "b", 3, 1),
        shrink("first", "again", 1, 3),
        shrink("third", "other", 1),
    )
    _, born = told(program, puppet.pid)
    a, b, again, other = born[2:]
    assert a["comm_hash"] == b["comm_hash"] != 0
    assert len({a["comm_hash"], again["comm_hash"], other["comm_hash"], born[0]["comm_hash"]}) == 4
    assert (a["comm_rank"], b["comm_rank"], other["comm_rank"]) == (0, 1, 1)
    assert (a["nranks"], other["nranks"]) == (2, 3)


def test_a_shrink_does_not_change_how_later_splits_are_known(tracing: Callable[..., Program], puppet):
    """The excluded rank has not taken part in the shrink, and may take part in the split."""
    program = tracing()
    split = "child = P(); lib.ncclCommSplit(comm({}), 7, 0, ctypes.byref(child), P(0))"
    puppet.does(
        init("stays", 0),
        init("leaves", 1),
        shrink("stays", "less", 1),
        split.format("stays"),
        split.format("leaves"),
    )
    _, born = told(program, puppet.pid)
    assert born[3]["comm_hash"] == born[4]["comm_hash"] != 0


def test_a_grown_communicator_is_one_for_old_and_new_ranks(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init("root", 0, nranks=2),
        init("old", 1, nranks=2),
        grow("comm(old)", "a"),
        ALL_REDUCE.format("a"),
        grow("comm(root)", "b", unique_id=NEW_ID),
        grow("P(0)", "c", rank=3, unique_id=NEW_ID),
        *(ALL_REDUCE.format(name) for name in "bc"),
    )
    arrivals, born = told(program, puppet.pid)
    assert born["comm_rank"][2:].tolist() == [1, 0, 3]
    assert born["nranks"][2:].tolist() == [4, 4, 4]
    grown = GrownCommunicators()
    assert len(set(grown.rename_created(born)["comm_hash"][2:].tolist())) == 1
    assert len(set(grown.replace_hashes(arrivals)["comm_hash"].tolist())) == 1
    assert arrivals["seq"].tolist() == [0, 0, 0]


def test_a_group_that_is_only_simulated_takes_no_round(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init("made", 2),
        ALL_REDUCE.format("made"),
        "lib.ncclGroupStart()",
        *[ALL_REDUCE.format("made")] * 3,
        "lib.ncclSend(P(0), Z(8), 7, 1, comm(made), P(0))",
        "lib.ncclGroupSimulateEnd(P(0))",
        ALL_REDUCE.format("made"),
        "lib.ncclSend(P(0), Z(8), 7, 1, comm(made), P(0))",
    )
    arrivals, _ = told(program, puppet.pid)
    assert arrivals["op"].tolist() == [Op.ALL_REDUCE, Op.ALL_REDUCE, Op.SEND]
    assert arrivals["seq"].tolist() == [0, 1, 0]
    assert (arrivals["flags"] == 0).all()


def test_a_collective_with_a_configuration_is_recorded_once(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init("made", 2), "lib.ncclReduceConfig(P(0), P(0), Z(16), 9, 1, 3, comm(made), P(55), P(0))")
    (arrival,) = told(program, puppet.pid)[0]
    assert (arrival["op"], arrival["peer_rank"], arrival["stream"], arrival["seq"]) == (Op.REDUCE, 3, 55, 0)


def test_one_sided_calls_are_work_for_the_gpu_but_no_round(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init("made", 2),
        "lib.ncclPutSignal(P(0), Z(8), 7, 1, P(0), Z(0), 0, 0, 0, comm(made), P(0))",
        "lib.ncclWaitSignal(1, P(0), comm(made), P(0))",
    )
    assert not len(told(program, puppet.pid)[0])
    assert program.processes().rows["n_collectives"].tolist() == [2]


def test_an_open_call_that_waits_for_other_ranks_is_in_the_process_state(
    tracing: Callable[..., Program], puppet
):
    program = tracing()
    puppet.does(init("made", 2))
    puppet.tell("lib.ncclCommWindowRegister(comm(made), P(0), Z(64), P(0), 0)")
    until(lambda: (program.processes().rows["slots"]["nccl_op"] == Op.COMM_SETUP).any())


def test_communicators_of_a_process_that_has_ended_are_forgotten(tracing: Callable[..., Program], puppet):
    """Its number may be given to another process, with the same addresses."""
    program = tracing()
    puppet.does(init("made", 2))
    assert n_communicators(program) == 1
    puppet.process.kill()
    puppet.process.wait()
    until(lambda: not n_communicators(program))


def n_communicators(program: Program) -> int:
    """The number of communicators of all processes that the kernel side knows."""
    fd, key, n = program._object.map_fd("comms"), None, 0
    following = ctypes.create_string_buffer(16)
    while n < 100 and not program._library.bpf_map_get_next_key(fd, key, following):
        n, key = n + 1, ctypes.create_string_buffer(following.raw, 16)
    return n
