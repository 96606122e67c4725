"""torch.profiler (Kineto) traces: Chrome trace JSON, plain or compressed, one file per rank, in folders or alone."""

from pathlib import Path

from stallscope.events.trace import Trace
from stallscope.importers.profile_trace import trace_of
from stallscope.importers.profiler_file import is_profile, profile_of
from stallscope.importers.registry import Importer
from stallscope.importers.texts import HEAD_BYTES, Source, files_of, head_of

_FAR_BYTES = 4 << 20  # a wrapper may put this much metadata before the events


def _accepts(file: Path, head: bytes) -> bool:
    if is_profile(head):
        return True
    is_json = ".json" in file.name and head.lstrip()[:1] == b"{"
    return is_json and len(head) == HEAD_BYTES and is_profile(head_of(file, _FAR_BYTES))


def _read(source: Source) -> Trace:
    profiles = [profile_of(file) for file in files_of(source) if _accepts(file, head_of(file))]
    return trace_of(profiles, f"torch.profiler traces of {len(profiles)} ranks")


IMPORTER = Importer("torch.profiler trace (one file per rank)", _accepts, _read)
