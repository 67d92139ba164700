"""The command `twinkle-server`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from ._config import ENVIRONMENT_PREFIX, ServerConfig, load_config
from ._errors import ConfigError, ServerError
from ._keys import SCOPES, create_key
from ._logging import configure_logging
from ._service import Service
from .store import Key, Store

DATA_DIR_VARIABLE = f"{ENVIRONMENT_PREFIX}DATA_DIR"
LONGEST_DAYS = 36_500


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given)
    except (ServerError, ValueError, OSError) as error:
        print(f"twinkle-server: {error}", file=sys.stderr)
    except SQLAlchemyError as error:
        print(f"twinkle-server: the database cannot be used: {str(error).splitlines()[0]}", file=sys.stderr)
    return 2


def entry() -> None:
    """The command's entry point."""
    sys.exit(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinkle-server", description="Twinkle's training service.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, run: object, under: argparse._SubParsersAction[argparse.ArgumentParser] = commands) -> argparse.ArgumentParser:
        added = under.add_parser(name, help=text, description=text)
        added.add_argument("-c", "--config", metavar="FILE", help="the configuration (YAML); TWINKLE_SERVER__... variables override it")
        added.set_defaults(run=run)
        return added

    launch = command("launch", "Serve. Without -c: a small model on the CPU, to try out, with a key that is printed.", _launch)
    launch.add_argument("--host")
    launch.add_argument("--port", type=int)
    command("check-config", "Check a configuration: fields, groups, engines, model folders, the database.", _check_config)
    command("print-config", "Print the configuration with all defaults.", _print_config)
    command("gc", "Delete what retention says, and folders that nobody knows. The server does it by itself, too.", _collect_garbage)
    keys = commands.add_parser("keys", help="API keys").add_subparsers(dest="keys_command", required=True)
    create = command("create", "Make a key and print it, once: only its hash is kept.", _create_key, keys)
    create.add_argument("tenant", help="whose key it is; objects belong to tenants")
    create.add_argument("--scope", action="append", choices=SCOPES, help="'use' (default), 'admin': may list other tenants' runs")
    create.add_argument("--label", default="", help="what it is for")
    create.add_argument("--days", type=float, help="expires after so many days")
    revoke = command("revoke", "Revoke a key; it ends within two seconds.", _revoke_key, keys)
    revoke.add_argument("key_id", help="as `keys list` shows it")
    command("list", "List all keys.", _list_keys, keys)
    return parser


def _config(given: argparse.Namespace) -> ServerConfig:
    return load_config(given.config)


def _launch(given: argparse.Namespace) -> int:
    import uvicorn

    from .http._app import create_app

    tries_out = given.config is None
    if tries_out:
        from ._trying_out import small_config

        config = small_config()
    else:
        config = load_config(given.config)
    changes = {name: value for name, value in (("host", given.host), ("port", given.port)) if value is not None}
    config = ServerConfig.model_validate({**config.model_dump(), **changes})
    configure_logging(config.log_level, config.log_format)
    # Before anything is made: what would end the server later is told now, in a line.
    _check_address(config.host, config.port)
    if config.runtime.mode == "local":
        _check_models(config)
    service = open_service(config)
    try:
        service.folders.lock()
    except ConfigError:
        service.store.close()
        raise
    if tries_out and not os.environ.get(DATA_DIR_VARIABLE):
        print("The data is in a new folder. To keep it for the next start, and for more keys (twinkle-server keys create NAME):")
        print(f"  export {DATA_DIR_VARIABLE}={config.data_dir}")
    scheme = "http" if config.tls_certfile is None else "https"
    if not service.store.live_keys():
        _, text = create_key(service.store, "local", scopes=("use", "admin"), label="made by launch")
        print("There was no API key; this one is shown only now:")
        print(f"  export TWINKLE_SERVER_URL={scheme}://{config.host}:{config.port} TWINKLE_SERVER_TOKEN={text}", flush=True)
    uvicorn.run(
        create_app(config, service),
        host=config.host,
        port=config.port,
        log_level=config.log_level,
        access_log=False,
        proxy_headers=True,
        forwarded_allow_ips=config.forwarded_allow_ips,
        ssl_certfile=None if config.tls_certfile is None else str(config.tls_certfile),
        ssl_keyfile=None if config.tls_keyfile is None else str(config.tls_keyfile),
        server_header=False,
        timeout_graceful_shutdown=30,
        log_config=None,
    )
    return 0


def open_service(config: ServerConfig) -> Service:
    """The service of a configuration; ConfigError where it would listen to others than this machine without any key."""
    from .engine._build import check_backends

    check_backends(config)
    service = Service(config)
    if config.is_public and not service.store.live_keys():
        service.store.close()
        raise ConfigError(
            f"{config.host} can be reached by others, and there is no API key in {_where(config)}: make one first "
            f"(twinkle-server keys create TENANT, with -c FILE or {DATA_DIR_VARIABLE}), or listen on 127.0.0.1"
        )
    return service


def _check_address(host: str, port: int) -> None:
    """ConfigError where nothing can listen there. The port is free again afterwards."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; another address is `host` and `port`, or --host and --port") from None


def _check_models(config: ServerConfig) -> None:
    """ConfigError where a model's folder holds none."""
    for model in config.models:
        for path in filter(None, (model.path, model.sampler and model.sampler.path)):
            if not (Path(path) / "config.json").is_file():
                raise ConfigError(f"{model.name}: {path} holds no Hugging Face checkpoint (config.json)")


def _where(config: ServerConfig) -> str:
    """The database, for people: without its password."""
    return make_url(config.url).render_as_string(hide_password=True)


def _check_config(given: argparse.Namespace) -> int:
    from .engine._build import check_backends

    config = _config(given)
    check_backends(config)
    _check_models(config)
    store = Store(config.url)
    if config.is_public and not store.live_keys():
        raise ConfigError(f"{config.host} can be reached by others, and there is no API key: launch would refuse")
    store.close()
    print("The configuration is right.")
    return 0


def _print_config(given: argparse.Namespace) -> int:
    print(yaml.safe_dump(_config(given).model_dump(mode="json"), sort_keys=False), end="")
    return 0


def _collect_garbage(given: argparse.Namespace) -> int:
    config = _config(given)
    service = Service(config)
    found = service.collect_garbage()
    # Folders younger than an hour may be a running server's, on their way into the database.
    found["folders"] = len(service.folders.sweep(service.store.known_folders, min_age_s=3600))
    service.store.close()
    print(json.dumps(found))
    return 0


def _create_key(given: argparse.Namespace) -> int:
    config = _config(given)
    if given.days is not None and not 0 < given.days <= LONGEST_DAYS:
        raise ConfigError(f"--days is more than 0 and at most {LONGEST_DAYS}, not {given.days:g}")
    store = Store(config.url)
    ttl_s = None if given.days is None else given.days * 86400
    key, text = create_key(store, given.tenant, scopes=tuple(given.scope or ("use",)), label=given.label, ttl_s=ttl_s)
    store.close()
    print(text)
    print(f"the key {key.id} of {key.tenant}, in {_where(config)}; only its hash is kept, and it cannot be shown again", file=sys.stderr)
    return 0


def _revoke_key(given: argparse.Namespace) -> int:
    config = _config(given)
    store = Store(config.url)
    done = store.revoke_key(given.key_id)
    store.close()
    if not done:
        raise ConfigError(f"there is no key {given.key_id} that is not revoked yet in {_where(config)}")
    print(f"revoked {given.key_id}")
    return 0


def _list_keys(given: argparse.Namespace) -> int:
    config = _config(given)
    store = Store(config.url)
    keys, _ = store.page(Key, limit=100_000, newest_first=False)
    store.close()
    if not keys:
        print(f"no keys in {_where(config)}", file=sys.stderr)
    now = time.time()
    for key in keys:
        state = "revoked" if key.revoked_at else "live"
        if key.expires_at and not key.revoked_at:
            state = ("expired " if key.expires_at <= now else "expires ") + _day(key.expires_at)
        print(f"{key.id}  {key.tenant:20} {','.join(key.scopes):10} {_day(key.created_at)}  {state:20} {key.label}")
    return 0


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d")


if __name__ == "__main__":
    entry()
