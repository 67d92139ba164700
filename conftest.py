"""Which tests share a process when several run at a time."""

from pathlib import Path

import pytest

# Their tests share worker processes or engines, which take long to start.
_WHOLE_FOLDERS = ("twinkle-megatron", "twinkle-vllm")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One group a file, or a folder where its files share what is slow to start."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        parts = item.path.relative_to(config.rootpath).parts
        folder = next((part for part in parts if part in _WHOLE_FOLDERS), None)
        item.add_marker(pytest.mark.xdist_group(folder or Path(*parts).as_posix()))
