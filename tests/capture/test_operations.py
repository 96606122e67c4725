"""The table of traced functions, and the cookies of their probes."""

import pytest

from stallscope.capture.probes import operations
from stallscope.capture.probes.cuda_table import ESSENTIAL
from stallscope.capture.probes.operations import ENTRIES, SYMBOLS, Entry
from stallscope.events.kernel import Action
from stallscope.events.names import Category, Op


def entry(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.symbol == name)


def field(name: str, shift: int, n_bits: int) -> int:
    return operations.cookie(entry(name)) >> shift & (1 << n_bits) - 1


def test_cookie_carries_operation_symbol_and_arguments():
    assert field("ncclReduce", 0, 8) == Op.REDUCE
    assert field("ncclReduce", 32, 8) == Action.COLLECTIVE
    assert SYMBOLS[field("ncclReduce", 16, 16)] == "ncclReduce"
    assert [field("ncclReduce", shift, 4) for shift in range(40, 64, 4)] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("name", "op", "inside"),
    [
        ("cudaStreamSynchronize_ptsz", Op.SYNC, Category.WAIT_GPU),
        ("cuCtxSynchronize_v2", Op.SYNC, Category.WAIT_GPU),
        ("cudaFreeHost", Op.FREE, Category.ALLOC),
        ("cuMemFree_v2", Op.FREE, Category.ALLOC),
        ("cuMemcpyHtoDAsync_v2_ptsz", Op.COPY, Category.COPY),
        ("cudaMemcpy_ptds", Op.COPY, Category.COPY),
        ("cudaLaunchKernelExC_ptsz", Op.LAUNCH, Category.LAUNCH),
    ],
)
def test_flavours_are_the_same_operation(name: str, op: Op, inside: Category):
    assert (entry(name).operation.op, entry(name).operation.inside) == (op, inside)


def test_every_cookie_is_different_and_fits():
    cookies = [operations.cookie(entry) for entry in ENTRIES]
    assert len(set(cookies)) == len(cookies)
    assert max(cookies) < 1 << 64


def test_launches_are_probed_only_on_request():
    offsets = {"cudaLaunchKernel": 16, "cudaFree": 32}
    assert [hook.symbol for hook in operations.hooks(offsets)] == ["cudaFree"]
    assert len(operations.hooks(offsets, launches=True)) == 2
    assert "cudaLaunchKernel" not in operations.names()


def test_only_blocking_functions_are_probed_when_probes_are_expensive():
    indexes = {name: number for number, name in enumerate(operations.names(), 1)}
    every = operations.hooks(indexes)
    kept = {hook.symbol for hook in operations.essential_hooks(every)}
    assert {*ESSENTIAL, "ncclAllReduce", "ncclCommInitRankConfig", "ncclCommSplit", "ncclGroupEnd"} <= kept
    assert not kept & {"cudaStreamCreate", "cuModuleLoadData", "cudaMalloc3DArray", "ncclCommWindowRegister"}
    assert len(kept) < len(every) / 4


def test_two_names_at_one_offset_share_a_probe():
    hooks = operations.hooks({"cuStreamSynchronize": 64, "cuStreamSynchronize_ptsz": 64, "unknown": 8})
    assert [hook.symbol for hook in hooks] == ["cuStreamSynchronize"]


def test_each_probe_names_its_bpf_part():
    offsets = {"ncclAllReduce": 8, "cudaMalloc": 16, "cudaGraphLaunch": 24}
    assert [hook.part for hook in operations.hooks(offsets)] == ["nccl", "cuda", "graph"]
    assert [hook.part for hook in operations.hooks(offsets, launches=True)] == [
        "nccl",
        "cuda",
        "cuda",
        "graph",
    ]
