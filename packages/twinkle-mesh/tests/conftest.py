"""What the tests of twinkle_mesh share: meshes to draw from, and a clean launcher environment."""

from math import prod
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from twinkle_mesh import DeviceMesh

# Shared, loaded machines pause a test at any time: an example has no deadline of its own, the run has one.
settings.register_profile("twinkle", deadline=None, max_examples=40, database=None)
settings.load_profile("twinkle")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def draw_mesh_sizes(draw: st.DrawFn) -> dict[str, Any]:
    names = ("pp_size", "dp_size", "fsdp_size", "cp_size", "ulysses_size", "tp_size")
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    stage = prod(sizes.values()) // sizes["pp_size"]
    if draw(st.booleans()):
        sizes["etp_size"] = draw(st.sampled_from(divisors(stage)))
        sizes["ep_size"] = draw(st.sampled_from(divisors(stage // sizes["etp_size"])))
        sizes["ep_fsdp_size"] = draw(st.sampled_from(divisors(stage // sizes["etp_size"] // sizes["ep_size"])))
    elif draw(st.booleans()):
        sizes["ep_size"] = draw(st.integers(1, 4))
        sizes["ep_fsdp_size"] = draw(st.integers(1, 3))
        sizes["world_size"] = prod(sizes.values())
    return sizes


@pytest.fixture(scope="session")
def meshes() -> SearchStrategy[DeviceMesh]:
    """Meshes of every kind: dense, with expert axes folded in, and with expert axes of their own."""
    return draw_mesh_sizes().map(lambda sizes: DeviceMesh.from_sizes(**sizes))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
