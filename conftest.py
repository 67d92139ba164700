"""Which tests share a process when several run at a time."""

import pytest

# Their tests share worker processes or engines, which take long to start.
_WHOLE_FOLDERS = ("twinkle-megatron", "twinkle-transformers", "twinkle-vllm")


def pytest_itemcollected(item: pytest.Item) -> None:
    """One group a file, or a folder where its files share what is slow to start. (Later hooks come after xdist has read the groups.)"""
    if item.config.pluginmanager.hasplugin("xdist"):
        path = item.path.relative_to(item.config.rootpath)
        folder = next((part for part in path.parts if part in _WHOLE_FOLDERS), None)
        item.add_marker(pytest.mark.xdist_group(folder or path.as_posix()))
