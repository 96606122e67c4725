"""Profiles of all ranks: torch.profiler traces in their containers, Nsight Systems exports, NCCL Inspector logs."""

import json
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from .job import WORLD, Job
from .ras import NAMES
from .shapes import Format
from .timeline import Call, calls

_BASE_NS = 1_790_000_000_000_000_000
_LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
_KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
_C10D = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "broadcast": "broadcast",
}


def _of_process(events: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [event | ({"pid": pid} if event["pid"] else {}) for event in events]


def _event(kind: str, name: str, ts_us: float, dur_us: float, **rest: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts_us, "dur": dur_us, "pid": 4000, "tid": 4000} | rest


def _arguments(job: Job, group: str) -> dict[str, Any]:
    """ParamCommsUtils.hpp: the arguments of a kernel of NCCL."""
    members = job.groups[group]
    return {
        "Collective name": _C10D[job.op_of(group)],
        "In msg nelems": job.n_elements,
        "Out msg nelems": job.n_elements,
        "Group size": len(members),
        "dtype": "BFloat16",
        "Process Group Name": "0" if group == WORLD else str(list(job.groups).index(group)),
        "Process Group Description": "default_pg" if group == WORLD else "undefined",
        "Process Group Ranks": str(list(members)),
    }


def _events(
    job: Job, own: list[Call], *, launch: str, kernel: str = "", is_named: bool = True
) -> list[dict[str, Any]]:
    """The events of one rank. kernel: the name of all communication kernels. is_named: kernels have arguments."""
    out = []
    for i, call in enumerate(own):
        link = {"correlation": i + 1}
        out.append(_event("user_annotation", _LOADER, call.begin_us, call.load_us))
        out.append(_event("cpu_op", "aten::mm", call.begin_us + call.load_us, call.work_us))
        out.append(_event("cuda_runtime", launch, call.arrive_us, 8, args=link))
        begin = call.arrive_us + 20
        arguments = (
            link
            | (_arguments(job, call.group) if is_named else {})
            | {"stream": 28 + 4 * (call.group == WORLD)}
        )
        name = kernel or _KERNELS[job.op_of(call.group)]
        out.append(_event("kernel", name, begin, call.end_us - begin, pid=0, tid=28, args=arguments))
        sync = call.arrive_us + 30
        out.append(
            _event(
                "cuda_runtime",
                f"{launch[:3] if launch[0] == 'h' else 'cuda'}StreamSynchronize",
                sync,
                call.end_us + 5 - sync,
            )
        )
    return out


def _by_rank(job: Job, chance: Random) -> list[list[Call]]:
    every = calls(job, chance)
    return [[call for call in every if call.rank == rank] for rank in range(job.n_ranks)]


def _trace(job: Job, rank: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": job.n_ranks},
        "baseTimeNanoseconds": _BASE_NS + job.number * 3600 * 10**9,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {}},
            *_of_process(events, job.pid(rank)),
        ],
        "traceName": "x.json",
    }


def rank_traces(job: Job, seed: int, *, has_steps: bool = False) -> list[dict[str, Any]]:
    """The torch.profiler trace of each rank. has_steps: the profiler had a schedule."""
    traces = []
    for rank, own in enumerate(_by_rank(job, Random(seed))):
        events = _events(job, own, launch="cudaLaunchKernelExC")
        traces.append(_trace(job, rank, (_steps(own) if has_steps else []) + events))
    return traces


def _steps(own: list[Call]) -> list[dict[str, Any]]:
    """ProfilerStep annotations: from the first call of a step to the end of its last call."""
    begin = {call.step: call.begin_us for call in reversed(own)}
    end = {call.step: call.end_us for call in own}
    name = "ProfilerStep#{}".format
    return [_event("user_annotation", name(step), begin[step], end[step] - begin[step]) for step in begin]


def _kineto(folder: Path, job: Job, chance: Random) -> None:
    """tensorboard_trace_handler: HOST_PID.TIME.pt.trace.json."""
    has_steps = chance.random() < 0.5
    for rank, trace in enumerate(rank_traces(job, chance.randrange(1000), has_steps=has_steps)):
        name = f"{job.host(rank)}_{job.pid(rank)}.{1790 + job.number}.pt.trace.json"
        (folder / name).write_text(json.dumps(trace))


def _variants(folder: Path, job: Job, chance: Random) -> None:
    """Other containers: the bare list, metadata of a wrapper first, a folder per rank, zip; graphs, ROCm, engines."""
    form = chance.choice(("list", "wrapped", "folders", "zip"))
    launch, kernel, is_named = chance.choice(
        (
            ("cudaGraphLaunch", "", False),
            ("hipExtLaunchKernel", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", True),
            (
                "cudaLaunchKernel",
                "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
                False,
            ),
            (
                "cudaLaunchKernel",
                "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>(P)",
                False,
            ),
        )
    )
    for rank, own in enumerate(_by_rank(job, chance)):
        trace = _trace(job, rank, _events(job, own, launch=launch, kernel=kernel, is_named=is_named))
        if form == "list":
            base_us = trace["baseTimeNanoseconds"] / 1000
            moved = [
                event | ({"ts": event["ts"] + base_us} if "ts" in event else {})
                for event in trace["traceEvents"]
            ]
            (folder / f"rank_{rank}.json").write_text(json.dumps(moved))
        elif form == "wrapped":
            (folder / f"rank{rank}_trace.json").write_text(
                json.dumps({"metadata": {"note": "x" * 2000}} | trace)
            )
        elif form == "folders":
            (folder / f"rank{rank}").mkdir()
            (folder / f"rank{rank}" / "trace.json").write_text(json.dumps(trace))
        else:
            with zipfile.ZipFile(folder / f"rank-{rank}.json.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(f"rank-{rank}.json", json.dumps(trace))


def _nsight(folder: Path, job: Job, chance: Random) -> None:
    """nsys export --type sqlite; one report per rank."""
    for rank, own in enumerate(_by_rank(job, chance)):
        with closing(sqlite3.connect(folder / f"report_rank{rank}.sqlite")) as db, db:
            db.execute("PRAGMA synchronous=OFF")
            db.execute("PRAGMA journal_mode=OFF")
            _write_report(db, job, rank, own)


def _write_report(db: sqlite3.Connection, job: Job, rank: int, own: list[Call]) -> None:
    db.executescript(
        """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
        CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
            globalTid INTEGER);
        CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
        CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);"""
    )
    db.execute(
        "INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (_BASE_NS + job.number * 3600 * 10**9,)
    )
    db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', ?)", (job.host(rank),))
    numbers: dict[str, int] = {}
    pid, thread = job.pid(rank) << 24, job.pid(rank) << 24 | 17

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    for event in _events(job, own, launch="cudaLaunchKernelExC_v11060"):
        begin = round(event["ts"] * 1000)
        end, link = begin + round(event["dur"] * 1000), event.get("args", {}).get("correlation", 0)
        if event["cat"] == "kernel":
            name, stream = number(event["name"]), event["args"]["stream"]
            row = (begin, end, rank % 4, 1, stream, link, pid, name, name)
            db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 9)})", row)
        elif event["cat"] == "cuda_runtime":
            row = (begin, end, 0, thread, link, number(event["name"]), 0)
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, name) for name, n in numbers.items()])


def _inspector(folder: Path, job: Job, chance: Random) -> None:
    """The Inspector's log: the time inside each collective, by communicator, rank and operation."""
    start_us = 1_764_410_000_000_000 + job.number * 3_600_000_000
    for rank, own in enumerate(_by_rank(job, chance)):
        lines = []
        made = dict.fromkeys(job.groups, 0)
        for call in own:
            members = job.groups[call.group]
            header = {
                "id": f"0x{job.comm_id(call.group):x}",
                "rank": members.index(rank),
                "n_ranks": len(members),
            }
            about = {
                "inspector_output_format_version": "v4.0",
                "git_rev": "",
                "rec_mechanism": "nccl_profiler_interface",
            }
            about |= {
                "dump_timestamp_us": start_us + round(call.end_us) + 400,
                "hostname": job.host(rank),
                "pid": job.pid(rank),
            }
            perf = {
                "coll": NAMES[job.op_of(call.group)],
                "coll_sn": made[call.group],
                "coll_msg_size_bytes": 2 * job.n_elements,
            }
            perf |= {
                "coll_exec_time_us": round(call.end_us - call.arrive_us),
                "coll_algobw_gbs": 1.0,
                "coll_busbw_gbs": 1.0,
            }
            made[call.group] += 1
            lines.append(json.dumps({"header": header | {"nnodes": 2}, "metadata": about, "coll_perf": perf}))
        (folder / f"{job.host(rank)}-pid{job.pid(rank)}.log").write_text("\n".join(lines) + "\n")


def _metrics(folder: Path, job: Job, chance: Random) -> None:
    """NCCL_INSPECTOR_PROM_DUMP: averages by GPU, one file per process."""
    for rank, own in enumerate(_by_rank(job, chance)):
        inside = [call.end_us - call.arrive_us for call in own if call.group == WORLD]
        labels = {
            "node": job.host(rank),
            "gpu": f"GPU{rank % max(job.n_ranks // 2, 1)}",
            "comm_name": "default",
            "nranks": str(job.n_ranks),
            "rank": str(rank),
            "collective": NAMES[job.op],
            "message_size": "4KB",
            "slurm_job_id": str(77 + job.number),
        }
        words = ",".join(f'{name}="{value}"' for name, value in labels.items())
        text = "# TYPE nccl_collective_exec_time_microseconds gauge\\n".replace("\\n", "\n")
        text += f"nccl_collective_exec_time_microseconds{{{words}}} {sum(inside) / len(inside):.1f}\n"
        (folder / f"nccl_inspector_{job.host(rank)}_{job.pid(rank)}.prom").write_text(text)


FORMATS = (
    Format(
        "torch.profiler traces",
        "pytorch/kineto 0.4, output_json.cpp; pytorch v2.9.0, ParamCommsUtils.hpp",
        _kineto,
        can_append=False,
    ),
    Format(
        "profiler variants",
        "pytorch/kineto 0.4; ROCm/rccl 2.22; vllm v0.10 custom_all_reduce.cuh; AMD-AGI/TraceLens",
        _variants,
        can_append=False,
        has_groups=False,
    ),
    Format(
        "Nsight Systems, SQLite",
        "Nsight Systems 2025.3 User Guide, SQLite Schema Reference",
        _nsight,
        is_text=False,
        can_compress=False,
        can_append=False,
        has_groups=False,
    ),
    Format("NCCL Inspector, JSON", "NVIDIA/nccl 5067397c, plugins/profiler/inspector/README.md", _inspector),
    Format(
        "NCCL Inspector, .prom",
        "NVIDIA/nccl 5067397c, plugins/profiler/inspector/README.md",
        _metrics,
        has_groups=False,
    ),
)
