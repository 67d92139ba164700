import pytest

from twinkle_mesh import LauncherError, launcher_local_rank, launcher_rank, launcher_world_size


def test_without_a_launcher_there_is_one_process() -> None:
    assert (launcher_rank(), launcher_world_size(), launcher_local_rank()) == (0, 1, 0)


def test_the_launchers_variables_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (3, 5):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert (launcher_rank(), launcher_world_size(), launcher_local_rank()) == (rank, 8, 1)


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "")
    assert (launcher_rank(), launcher_world_size(), launcher_local_rank()) == (0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"RANK": "-1"}, "RANK is -1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 but WORLD_SIZE=4"),
    ],
)
def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str) -> None:
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(LauncherError, match=message):
        launcher_rank()
