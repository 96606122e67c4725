"""Python frames walked in the kernel: each call of a program that says in advance from where it makes it."""

import pytest

from .calls_walked import walked
from .interpreters import EACH_VERSION, INTERPRETERS

pytestmark = [pytest.mark.bpf, pytest.mark.compiler]

N_CALLS = 1500


@pytest.mark.parametrize("minor", EACH_VERSION)
def test_every_walk_is_right_while_other_threads_run(tracing, library, minor):
    program = tracing(slow_call_ns=0)
    assert walked(program, INTERPRETERS[minor], library, N_CALLS) == {"right": N_CALLS}


def test_a_process_that_was_not_told_of_has_no_stacks(tracing, puppet):
    program = tracing(slow_call_ns=0)
    puppet.does("lib.cudaStreamSynchronize(0, 0)")
    assert not len(program.stacks.drain())
