"""Reduce a recording to the events that the diagnosis needs: python cut_recording.py FOLDER OUT [SECONDS].

Dropped: launches and stream waits, events of threads that make no CUDA or NCCL call, other processes' disk
requests, the NCCL profiler's file. Kept as they are: all other events, and the clock out of truth.json.
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def cut(folder: Path, out: Path) -> None:
    """Write the cut recording to a new folder."""
    data = json.loads((folder / "truth.json").read_text())
    events = pq.read_table(folder / "events.parquet")
    kind, symbol = pc.cast(events["kind"], pa.string()), pc.cast(events["symbol"], pa.string())
    is_call = pc.is_in(kind, pa.array(["enter", "return"]))
    wanted = pc.invert(pc.match_substring_regex(symbol, "Launch|StreamWaitEvent"))
    calls = pc.and_(is_call, wanted)
    tids = pc.unique(events.filter(calls)["tid"]).cast(pa.uint64())
    switches = pc.and_(
        pc.equal(kind, "sched_switch"), pc.or_(pc.is_in(events["a2"], tids), pc.is_in(events["a3"], tids))
    )
    wakeups = pc.and_(pc.equal(kind, "sched_wakeup"), pc.is_in(events["a1"], tids))
    ranks = pa.array(data["rank_pids"], pa.uint32())
    disk = pc.or_(
        pc.and_(pc.equal(kind, "block_issue"), pc.is_in(events["pid"], ranks)),
        pc.equal(kind, "block_complete"),
    )
    issued = pc.unique(
        events.filter(pc.and_(pc.equal(kind, "block_issue"), pc.is_in(events["pid"], ranks)))["a0"]
    )
    disk = pc.and_(disk, pc.is_in(events["a0"], issued))
    kept = events.filter(pc.or_(pc.or_(calls, switches), pc.or_(wakeups, disk)))
    out.mkdir(parents=True)
    pq.write_table(kept, out / "events.parquet", compression="zstd", compression_level=19)
    clock = {name: data[name] for name in ("scenario", "hardware", "software", "rank_pids", "clock", "note")}
    (out / "truth.json").write_text(json.dumps(clock, indent=1) + "\n")


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]))
