"""Servers for the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from twinkle_server import ServerConfig, Service, parse_config


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    """Of a server without models."""
    return parse_config({"data_dir": str(tmp_path / "data")})


@pytest.fixture
def make_service(config: ServerConfig) -> Callable[[], Service]:
    """Makes services over one data folder."""
    return lambda: Service(config)
