"""The configuration: what it takes, what the environment overrides, what it refuses."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from twinkle_server import ConfigError, create_key, load_config, parse_config
from twinkle_server._errors import describe
from twinkle_server.cli import main, open_service
from twinkle_server.store import Store


def test_defaults_listen_on_this_machine_only() -> None:
    config = parse_config({})
    assert config.host == "127.0.0.1"
    assert not config.is_public
    assert config.url.startswith("sqlite:///")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_it_refuses_to_listen_publicly_without_a_key(host: str, tmp_path: Path) -> None:
    config = parse_config({"host": host, "data_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="no API key"):
        open_service(config)
    store = Store(config.url)
    key, _ = create_key(store, "a")
    open_service(config).store.close()
    store.revoke_key(key.id)
    with pytest.raises(ConfigError, match="no API key"):
        open_service(config)


def test_the_environment_overrides_fields_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nlimits: {runs: 5, sessions: 6}\n")
    config = load_config(file, {"TWINKLE_SERVER__PORT": "2", "TWINKLE_SERVER__LIMITS__RUNS": "7", "TWINKLE_SERVER_URL": "http://elsewhere"})
    assert (config.port, config.limits.runs, config.limits.sessions) == (2, 7, 6)


def test_every_wrong_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({"prot": 1, "models": [{"name": "../x", "path": "p"}, {"name": "y", "path": "p", "max_loras": 0}]}))
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    for told in ("prot: there is no such setting; is 'port' meant?", "models.0.name", "models.1.max_loras"):
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"limits": {"body_byte": 1024}}, "limits.body_byte: there is no such setting; is 'body_bytes' meant?"),
        ({"models": [{"name": "a", "path": "p", "sampler": {"backnd": "vllm"}}]}, "models.0.sampler.backnd: .*'backend'"),
        ({"retention": {"zzz": 1}}, "retention.zzz: there is no such setting; there are session_s, "),
        ({"models": [{"name": "a", "path": "p", "max_lora": 3}]}, "models.0.max_lora: .*'max_loras'"),
    ],
)
def test_a_misspelt_setting_is_told_with_the_right_one(content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"models": [{"name": "a", "path": "p"}] * 2}, "two models are named a"),
        ({"models": [{"name": "a", "path": "p", "group": "gpus"}]}, "names the group 'gpus'"),
        ({"tls_certfile": "x"}, "belong together"),
        ({"limits": {"body_timeout_s": float("nan")}}, "body_timeout_s"),
    ],
)
def test_what_cannot_work_together_is_refused(content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(content)


def test_code_from_a_checkpoint_cannot_be_switched_on(tmp_path: Path) -> None:
    model = {"name": "a", "path": "p", "options": {"trust_remote_code": True}}
    with pytest.raises(ConfigError, match="trust_remote_code"):
        open_service(parse_config({"data_dir": str(tmp_path), "models": [model]}))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [({"tp_size": 3}, "the mesh has 3 ranks, the group 'trainers' 4 workers"), ({"tp_size": 0}, "cannot be"), ({"size": 4}, "cannot be")],
)
def test_a_mesh_that_does_not_fit_its_group_is_refused_before_anything_is_loaded(mesh: dict[str, int], message: str, tmp_path: Path) -> None:
    model = {"name": "a", "path": "p", "group": "trainers", "mesh": mesh}
    runtime = {"mode": "ray", "groups": [{"name": "trainers", "ranks": 4}]}
    with pytest.raises(ConfigError, match=message):
        open_service(parse_config({"data_dir": str(tmp_path), "models": [model], "runtime": runtime}))


def test_commands_make_list_and_revoke_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"data_dir: {tmp_path / 'data'}\n")
    assert main(["keys", "create", "alice", "--scope", "use", "--days", "1", "--label", "laptop", "-c", str(file)]) == 0
    text = capsys.readouterr().out.strip()
    key_id = text.split("-")[1]
    assert main(["keys", "list", "-c", str(file)]) == 0
    listed = capsys.readouterr().out
    assert key_id in listed
    assert "alice" in listed
    assert text not in listed
    secret = text.split("-")[2].encode()
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert main(["keys", "revoke", key_id, "-c", str(file)]) == 0
    assert main(["keys", "revoke", key_id, "-c", str(file)]) == 2
    assert main(["keys", "create", "../alice", "-c", str(file)]) == 2
    assert main(["check-config", "-c", str(file)]) == 0
    assert main(["print-config", "-c", str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out.rpartition("The configuration is right.\n")[2])["port"] == 8000
    assert main(["gc", "-c", str(file)]) == 0


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "1e9"])
def test_a_key_that_never_was_or_ever_is_valid_is_not_made(days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"data_dir: {tmp_path / 'data'}\n")
    assert main(["keys", "create", "alice", "-c", str(file), "--days", days]) == 2
    assert "days" in capsys.readouterr().err


def test_keys_say_where_they_are_and_which_have_expired(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "list"]) == 0
    where = str(tmp_path / "twinkle-server-data" / "server.db")
    assert where in capsys.readouterr().err  # there is none, in a database that may be another than the server's
    assert main(["keys", "create", "alice", "--days", "0.0000001"]) == 0
    assert where in capsys.readouterr().err
    assert main(["keys", "list"]) == 0
    assert " expired " in capsys.readouterr().out
    assert main(["keys", "revoke", "nobodys"]) == 2
    assert where in capsys.readouterr().err


def test_launch_says_in_a_line_why_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = tmp_path / "server.yaml", tmp_path / "data"
    file.write_text(f"data_dir: {data}\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["launch", "-c", str(file), "--port", str(other.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert not data.exists()  # no key was made, that the next launch would not show
    service = open_service(parse_config({"data_dir": str(data)}))
    service.folders.lock()
    try:
        assert main(["launch", "-c", str(file), "--port", "0"]) == 2
    finally:
        service.folders.unlock()
        service.store.close()
    told = capsys.readouterr()
    assert "another server uses" in told.err
    assert not told.out
    file.write_text(yaml.safe_dump({"data_dir": str(data), "models": [{"name": "a", "path": str(tmp_path / "nowhere")}]}))
    assert main(["launch", "-c", str(file), "--port", "0"]) == 2
    assert "nowhere holds no Hugging Face checkpoint" in capsys.readouterr().err


def test_a_full_disk_is_told_as_one_whoever_tells_of_it() -> None:
    database = create_engine("sqlite://")
    with database.begin() as connection:
        connection.execute(text("PRAGMA max_page_count = 1"))
        with pytest.raises(OperationalError) as caught:
            connection.execute(text("CREATE TABLE large (column_a TEXT)"))
    assert describe(caught.value).status == 507
    assert describe(RuntimeError("could not save: SafetensorError: I/O error: No space left on device (os error 28)")).status == 507
    assert describe(OSError(errno.ENOSPC, "full")).status == 507
    assert describe(OSError(errno.EIO, "broken")).status == 500


def test_importing_it_loads_no_engine() -> None:
    code = "import twinkle_server, sys; print([name for name in ('torch', 'ray', 'transformers', 'vllm') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "[]"
