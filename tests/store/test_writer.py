"""One writer at a time, also when one is killed; times of one boot in one file."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from stallscope.errors import StorageFailed
from stallscope.store import node
from stallscope.store.node import NodeTrace
from stallscope.store.writer_lock import only_writer, set_aside_if_of_another_boot

HOLD = """
import sys; from pathlib import Path; from stallscope.store.writer_lock import only_writer
with only_writer(Path(sys.argv[1])):
    print(flush=True); input()
"""
MOMENT = 1_700_000_000 * 10**9  # 2023-11-14 22:13:20 UTC


def test_a_second_writer_is_refused_until_the_first_has_gone(tmp_path):
    db = tmp_path / "new" / "trace.db"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(db)], stdin=-1, stdout=-1) as holder:
        holder.stdout.readline()
        with pytest.raises(StorageFailed, match="another stallscope trace"), only_writer(db):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    with only_writer(db):
        pass


def test_a_new_trace_has_tables_before_it_is_opened_for_writing(tmp_path):
    """The writer opens the file only some milliseconds later; a reader may come first."""
    db = tmp_path / "trace.db"
    with only_writer(db, os.getgid()):
        assert len(node.read(db).collectives) == 0
        assert (db.stat().st_mode & 0o777, db.stat().st_gid) == (0o640, os.getgid())
        assert list(tmp_path.glob(".*")) == []


def test_leftovers_of_a_killed_writer_do_not_prevent_a_new_trace(tmp_path):
    db = tmp_path / "trace.db"
    db.with_name(f".trace.db.new-{os.getpid()}").write_text("half")
    with only_writer(db), closing(NodeTrace(db)):
        assert list(tmp_path.glob(".*")) == []


def test_a_file_system_without_links_gets_a_trace(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    db = tmp_path / "trace.db"
    with only_writer(db, os.getgid()), closing(NodeTrace(db)):
        assert len(node.read(db).collectives) == 0


def test_the_lock_leaves_sqlites_own_locks_alone(tmp_path):
    db = tmp_path / "trace.db"
    with only_writer(db), closing(NodeTrace(db)) as store:
        number = store.node("a")
        store.commit()
        assert node.read(db).nodes == ("a",)
    assert number == 1


@pytest.mark.parametrize("path", ["/proc/nothing/trace.db", "/"])
def test_an_unwritable_path_is_reported_in_one_line(path, tmp_path):
    with (
        pytest.raises(StorageFailed, match="choose another path with --db") as caught,
        only_writer(Path(path)),
    ):
        pass
    assert "\n" not in str(caught.value)


def trace_of_boot(path, boot_id):
    with closing(NodeTrace(path)) as store:
        store.session(store.node("a"), "test", started_ns=0, facts={"boot_id": boot_id} if boot_id else {})


def test_a_trace_of_another_boot_is_kept_under_another_name(tmp_path):
    db = tmp_path / "trace.db"
    trace_of_boot(db, "one")
    aside = set_aside_if_of_another_boot(db, "other", MOMENT)
    assert aside == tmp_path / "trace-until-20231114T221320.db"
    assert node.read(aside).nodes == ("a",)
    assert not db.exists()


def test_rows_not_yet_in_the_main_file_move_with_it(tmp_path):
    """A machine that went down leaves its last seconds in the write-ahead log."""
    db = tmp_path / "trace.db"
    code = (
        "import os, sys; from pathlib import Path; from stallscope.store.node import NodeTrace\n"
        "store = NodeTrace(Path(sys.argv[1])); store.commit()\n"
        "store.session(store.node('a'), 'test', started_ns=0, facts={'boot_id': 'one'}); store.commit()\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(db)], check=False)
    assert db.with_name("trace.db-wal").exists()
    aside = set_aside_if_of_another_boot(db, "other", MOMENT)
    assert node.read(aside).nodes == ("a",)
    assert not db.with_name("trace.db-wal").exists()


@pytest.mark.parametrize("boot_id", ["one", ""])
def test_a_trace_of_this_boot_or_of_none_stays(tmp_path, boot_id):
    db = tmp_path / "trace.db"
    trace_of_boot(db, boot_id)
    assert set_aside_if_of_another_boot(db, "one", time.time_ns()) is None
    assert db.exists()


def test_a_file_that_is_not_a_trace_is_not_moved(tmp_path):
    db = tmp_path / "trace.db"
    assert set_aside_if_of_another_boot(db, "one", 0) is None
    db.write_text("my only copy")
    assert set_aside_if_of_another_boot(db, "one", 0) is None
    assert db.read_text() == "my only copy"
