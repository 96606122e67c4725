"""`stallscope annotate`: its labels and its refusals."""

import pytest

from stallscope.capture.process.annotation_socket import Labels


@pytest.fixture
def labels(tmp_path):
    listening = Labels(tmp_path / "a.sock")
    yield listening
    listening.close()


def test_labels_reach_the_agent(run, labels):
    assert run("annotate", "step=100", "phase=evaluation", "--annotate-socket", labels.path) == (0, "", "")
    assert [label[1:] for label in labels.take_labels()] == [(0, "step", "100"), (0, "phase", "evaluation")]


def test_a_process_can_be_named(run, labels):
    assert run("annotate", "step=1", "--pid", "42", "--annotate-socket", labels.path)[0] == 0
    assert labels.take_labels()[0].pid == 42


@pytest.mark.parametrize(("words", "code"), [(("step",), 2), (("STEP=1",), 2), (("=1",), 2)])
def test_malformed_labels_are_refused(run, labels, words, code):
    got = run("annotate", *words, "--annotate-socket", labels.path)
    assert got[:2] == (code, "")
    assert got[2].count("\n") == 1


def test_a_missing_agent_is_reported(run, tmp_path):
    code, out, err = run("annotate", "step=1", "--annotate-socket", tmp_path / "none.sock")
    assert (code, out) == (3, "")
    assert "stallscope trace" in err
