"""The programs that record requests, loaded once for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture.probes.program import Options, Program


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """A kernel without the tracepoints skips the test. A verifier that refuses the programs is an error."""
    if b"btf_trace_sock_send_length" not in Path("/sys/kernel/btf/vmlinux").read_bytes():
        pytest.skip("this kernel has no tracepoints on the lengths of reads and writes (Linux 6.3)")
    with Program.load(Options()) as loaded:
        assert loaded.records_requests, "the kernel refuses the programs that record requests"
        yield loaded
