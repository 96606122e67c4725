"""Answers of a hub's tools as text: a table where it fits, otherwise a block for each row."""

from stallscope.commands.ask import as_text
from stallscope.serve.client import error_of

VERDICT = {
    "verdict_id": "ab12",
    "summary": "Rank 6 slows down the job.",
    "ranks": [6, 7],
    "comm_hash": None,
    "advice": ["Stage the files on a local disk.", "Compare the disk's latency."],
}


def test_a_table_that_is_too_wide_becomes_a_block_for_each_row() -> None:
    text = as_text({"summary": "1 verdict.", "rows": [VERDICT]}, width=80)
    assert text.splitlines() == [
        "1 verdict.",
        "",
        "Rank 6 slows down the job.",
        "  verdict_id  ab12",
        "  ranks       6, 7",
        "  advice      Stage the files on a local disk.",
        "              Compare the disk's latency.",
    ]


def test_a_pipe_gets_one_line_for_each_row() -> None:
    lines = as_text({"summary": "1 verdict.", "rows": [VERDICT]}).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["verdict_id", "summary", "ranks", "advice"]


def test_columns_of_the_same_name_are_all_printed() -> None:
    answer = {"columns": ["a", "a", "empty"], "rows": [[1, 2, None], [3, 4, None]]}
    assert as_text(answer, width=80).splitlines() == ["a  a", "1  2", "3  4"]
    assert as_text(answer, width=3).splitlines() == [
        "",
        "1.",
        "  a  1",
        "  a  2",
        "",
        "2.",
        "  a  3",
        "  a  4",
    ]


def test_an_answer_without_rows_says_so() -> None:
    assert as_text({"rows": []}, width=80) == "(no rows)"
    assert as_text({"summary": "No idle GPU.", "rows": []}, width=80) == "No idle GPU."


def test_the_advice_of_an_error_names_the_command() -> None:
    error = error_of("not_found", "no job 'x'; fleet.cluster.summary lists the jobs")
    assert str(error) == "no job 'x'; `stallscope ask summary` lists the jobs"
