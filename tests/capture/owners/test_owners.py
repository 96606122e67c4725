"""The labels of processes, completed by schedulers; what an operator keeps private."""

import http.client
import time

import pytest

from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.privacy import Privacy
from stallscope.capture.owners.schedulers import OwnerOptions, owner_sources
from stallscope.errors import BadInput


class Scheduler:
    """A source whose answer the test sets."""

    name, every_s = "Scheduler", 0.01

    def __init__(self, answers=None, error: OSError | None = None):
        self.answers, self.error, self.n_refreshed = answers or {}, error, 0

    def refresh(self) -> None:
        self.n_refreshed += 1
        if self.error:
            raise self.error

    def labels(self, known, hints):
        return self.answers.get(known.get("job"), {})

    def allocations(self):
        return []


def owners(*sources, privacy=None, note=lambda text: None) -> Owners:
    return Owners(sources, privacy, note, process_labels=lambda pid, variables: dict(variables))


def rows_of(owned: Owners, new, now_ns=100):
    rows = owned.rows(new, node=3, now_ns=now_ns, first_ns={7: 50})
    return {int(row["pid"]): (int(row["ts_ns"]), row["owner_user"].decode()) for row in rows}


def test_a_row_is_written_at_the_start_and_after_a_change():
    scheduler = Scheduler()
    owned = owners(scheduler)
    assert rows_of(owned, {7: {"job": "1", "user": "root"}, 8: {}}) == {7: (50, "root")}
    assert rows_of(owned, {}) == {}
    scheduler.answers = {"1": {"user": "ann"}}
    assert rows_of(owned, {}, now_ns=200) == {7: (50, "ann")}
    owned.forget(7)
    assert rows_of(owned, {}) == {}


def test_labels_of_a_scheduler_stay_when_it_forgets_the_job_before_the_process_ends():
    scheduler = Scheduler({"1": {"user": "ann"}})
    owned = owners(scheduler)
    assert rows_of(owned, {7: {"job": "1", "user": "root"}}) == {7: (50, "ann")}
    scheduler.answers = {}
    assert rows_of(owned, {}) == {}
    assert owned.labels(7) == {"job": "1", "user": "ann"}
    assert rows_of(owned, {7: {"job": "2", "user": "bob"}}) == {7: (50, "bob")}


def test_a_scheduler_is_asked_once_a_second_for_each_process():
    scheduler, asked = Scheduler(), []
    scheduler.labels = lambda known, hints: asked.append(known) or {}
    owned = owners(scheduler)
    owned.rows({7: {}, 8: {}}, node=0, now_ns=1, first_ns={})
    for pid in (7, 8, 7):
        owned.labels(pid)
    assert len(asked) == 2


def test_long_and_unprintable_values_are_cut():
    owned = owners()
    rows = owned.rows({7: {"job_name": "\x1b[31mä" * 60}}, node=0, now_ns=1, first_ns={})
    name = rows["owner_job_name"][0].decode()
    assert len(name.encode()) <= 128
    assert name.isprintable()


def test_private_labels_are_dropped_or_hashed_everywhere():
    privacy = Privacy.of("account, tags", "user", "key")
    kept = privacy.applied({"user": "ann", "account": "ml", "job": "1"})
    assert kept.keys() == {"user", "job"}
    assert kept["user"] != "ann"
    assert kept == privacy.applied({"user": "ann", "job": "1"})
    assert kept["user"] != Privacy.of("", "user", "other").applied({"user": "ann"})["user"]
    assert rows_of(owners(privacy=privacy), {7: {"user": "ann"}})[7][1] == kept["user"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("moon", "", ""), "unknown owner label 'moon'"), (("", "user", ""), "owner_hash needs owner_hash_key")],
)
def test_wrong_private_labels_are_refused(words, message):
    with pytest.raises(BadInput, match=message):
        Privacy.of(*words)


@pytest.mark.parametrize(
    "error",
    [OSError("it does not answer"), http.client.HTTPException("it does not answer")],
    ids=lambda e: type(e).__name__,
)
def test_a_scheduler_without_an_answer_costs_one_line(error):
    notes: list[str] = []
    scheduler = Scheduler(error=error)
    owned = owners(scheduler, note=notes.append)
    owned.start()
    end_s = time.monotonic() + 20
    while not scheduler.n_refreshed and time.monotonic() < end_s:
        time.sleep(0.01)
    while not notes and time.monotonic() < end_s:
        assert rows_of(owned, {7: {"user": "ann"}}).get(7, (0, "ann"))[1] == "ann"
        time.sleep(0.01)
    owned.close()
    assert notes == ["owners of Scheduler are incomplete: it does not answer; stallscope will retry"]


def test_only_known_schedulers_are_asked():
    assert owner_sources(OwnerOptions(), {}) == []
    names = [source.name for source in owner_sources(OwnerOptions(kinds="slurm, ecs", node="n"), {})]
    assert names == ["Slurm", "ECS"]
    with pytest.raises(BadInput, match="'moon' is not known"):
        owner_sources(OwnerOptions(kinds="moon"), {})
    with pytest.raises(BadInput, match="kubernetes_address"):
        owner_sources(OwnerOptions(kinds="kubernetes"), {})
    gpus, source = owner_sources(OwnerOptions(kinds="kubernetes"), {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert source.gpus is gpus
    assert source.api.address == "https://[fd00::1]:443"
