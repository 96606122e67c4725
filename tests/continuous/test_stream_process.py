"""Streams in a process of their own give the same verdicts; the end of the process is stated and repaired."""

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stallscope.continuous import ContinuousDiagnosis
from stallscope.continuous.stream_process import ProcessEnded, StepFailed, StreamProcess
from stallscope.continuous.streams import Streams
from stallscope.diagnose import Stream
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

from ..patience import until
from .test_continuous_diagnosis import TENANT, as_arrow, slow_job, verdicts


class Broken(Stream):
    """A stream whose evaluation raises, as with a defect."""

    def feed(self, *_, **__):
        raise ZeroDivisionError


def test_a_stream_in_a_process_returns_the_changes_of_a_stream_here():
    tables, key = as_arrow(slow_job(), "b1").tables, (TENANT, "c1")
    expected = Streams(Stream).feed(key, tables)
    with closing(StreamProcess(Stream)) as streams:
        changes = streams.feed(key, tables)
        assert [change.verdict.causes for change in changes] == [change.verdict.causes for change in expected]
        assert [change.kind for change in changes] == ["opened"]
        advance = streams.tick()[key]
        assert advance.n_jobs == 1 and list(advance.confirmed_ns) == [changes[0].incident_id]


def test_the_process_imports_from_the_folders_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A package starts Python with folders that no environment variable names."""
    environments: list[dict[str, str]] = []
    start = subprocess.Popen

    def popen(words: list[str], *, env: dict[str, str], **options: Any) -> "subprocess.Popen[bytes]":
        environments.append(env)
        return start(words, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.syspath_prepend(tmp_path)
    with closing(StreamProcess(Stream)) as streams:
        streams.feed((TENANT, "c1"), as_arrow(slow_job(), "b1").tables)
    assert str(tmp_path) in environments[0]["PYTHONPATH"].split(os.pathsep)


def test_a_failed_step_is_raised_by_its_kind_and_the_process_continues():
    with closing(StreamProcess(Broken)) as streams:
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            streams.feed((TENANT, "c1"), as_arrow(slow_job(), "b1").tables)
        assert streams.tick()[TENANT, "c1"].failure == ""


def test_the_end_of_the_process_is_raised_with_its_signal_and_the_next_rows_start_another_process():
    tables, key = as_arrow(slow_job(), "b1").tables, (TENANT, "c1")
    with closing(StreamProcess(Stream)) as streams:
        streams.feed(key, tables)
        os.kill(streams.pid, signal.SIGKILL)
        with pytest.raises(ProcessEnded, match="SIGKILL"):
            streams.feed(key, tables)
        assert [change.kind for change in streams.feed(key, tables)] == ["opened"]


def test_after_the_end_of_the_process_the_answer_is_unknown_and_the_incident_continues(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("stallscope.continuous.shard._MIN_RUN_S", 0.0)
    with (
        closing(HubStore.open(tmp_path, Limits(maintenance_s=3600))) as store,
        closing(ContinuousDiagnosis(store, n_processes=1)) as diagnosis,
    ):
        store.append(as_arrow(slow_job(), "b1")).result(30)
        until(lambda: verdicts(store))
        (shard,) = diagnosis._shards
        os.kill(shard._streams.pid, signal.SIGKILL)
        until(lambda: "the process of the diagnosis" in store.unexamined.reason(TENANT, "c1"))
        until(lambda: diagnosis.confirmed_ns(TENANT) and diagnosis.is_idle())
        assert [row[-1] for row in verdicts(store)] == ["open"]
