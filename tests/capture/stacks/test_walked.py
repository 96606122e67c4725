"""Python frames walked in the kernel: each call of a program that announces its code locations."""

import numpy as np
import pytest

from stallscope.capture.rows.records import of_kind
from stallscope.events.kernel import Kind

from .calls_walked import walked
from .interpreters import EACH_VERSION, INTERPRETERS
from .test_walked_native import Told

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

N_CALLS = 1500


@pytest.mark.parametrize("minor", EACH_VERSION)
def test_every_walk_is_right_while_other_threads_run(tracing, library, minor):
    program = tracing(slow_call_ns=0)
    assert walked(program, INTERPRETERS[minor], library, N_CALLS) == {"right": N_CALLS}


def test_a_process_that_is_not_followed_has_no_stacks(tracing, puppet):
    program = tracing(slow_call_ns=0)
    puppet.does("lib.cudaStreamSynchronize(0, 0)")
    assert not len(program.stacks.drain())


def test_repeated_blocks_at_one_location_are_walked_less_often(tracing, puppet):
    program = tracing(slow_off_ns=1_000_000)
    Told(program).follow(puppet.pid)
    puppet.does("import select, time", "lib.cudaStreamSynchronize(0, 0)")
    n_walked = []
    for words in (
        "[time.sleep(0.006) for _ in range(50)]",
        "[(time.sleep(0.006), select.select([], [], [], 0.006)) for _ in range(25)]",
    ):
        puppet.does(words)
        away = of_kind(program.events.drain(), Kind.OFF_CPU)
        away = away[(away["pid"] == puppet.pid) & (away["duration_ns"] > 5_000_000)]
        n_walked.append(np.count_nonzero(away["stack"]))
    at_one_place, elsewhere = n_walked
    assert 0 < at_one_place < elsewhere
    assert elsewhere > 40
