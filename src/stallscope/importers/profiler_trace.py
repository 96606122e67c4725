"""torch.profiler (Kineto) traces: Chrome trace JSON, plain or compressed, one file per rank, in folders or alone."""

from collections.abc import Sequence
from pathlib import Path

from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace
from stallscope.importers.profile_trace import trace_of
from stallscope.importers.profiler_file import is_profile, profiles_of
from stallscope.importers.registry import Importer, Unread, each_readable
from stallscope.importers.texts import HEAD_BYTES, head_of

_FAR_BYTES = 4 << 20  # a wrapper may put this much metadata before the events


def _accepts(file: Path, head: bytes) -> bool:
    if is_profile(head):
        return True
    is_json = ".json" in file.name and head.lstrip()[:1] == b"{"
    return is_json and len(head) == HEAD_BYTES and is_profile(head_of(file, _FAR_BYTES))


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    profiles = [profile for parts in each_readable(files, profiles_of, unread) for profile in parts]
    n_ranks = len({profile.file if profile.rank == UNKNOWN else profile.rank for profile in profiles})
    return trace_of(profiles, f"torch.profiler trace{'s' * (n_ranks > 1)} of {counted(n_ranks, 'rank')}")


IMPORTER = Importer("torch.profiler trace (one file per rank)", _accepts, _read)
