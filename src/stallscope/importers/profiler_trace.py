"""torch.profiler (Kineto) traces: Chrome trace JSON, plain or compressed, one file per rank, in folders or alone."""

from pathlib import Path

from stallscope.events.trace import Trace
from stallscope.importers.profile_trace import trace_of
from stallscope.importers.profiler_file import is_profile, profile_of
from stallscope.importers.registry import Importer
from stallscope.importers.texts import Source, files_of, head_of


def _accepts(file: Path, head: bytes) -> bool:
    return is_profile(head)


def _read(source: Source) -> Trace:
    profiles = [profile_of(file) for file in files_of(source) if is_profile(head_of(file))]
    return trace_of(profiles, f"torch.profiler traces of {len(profiles)} ranks")


IMPORTER = Importer("torch.profiler trace (one file per rank)", _accepts, _read)
