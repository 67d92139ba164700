"""The package as users see it: its names, its errors, its README."""

import pickle
import re
from pathlib import Path

import pytest

import twinkle_transformers

ERRORS = [
    (twinkle_transformers.LayoutError, ValueError),
    (twinkle_transformers.ModelNotFoundError, FileNotFoundError),
    (twinkle_transformers.UnsupportedModelError, ValueError),
    (twinkle_transformers.CheckpointError, OSError),
]


def test_all_is_sorted_and_documented() -> None:
    names = twinkle_transformers.__all__
    assert names == sorted(names)
    for name in names:
        assert (getattr(twinkle_transformers, name).__doc__ or "").strip(), name


@pytest.mark.parametrize(("kind", "stdlib"), ERRORS)
def test_errors_are_the_stdlib_type_they_are_and_pickle(kind: type[Exception], stdlib: type[Exception]) -> None:
    assert issubclass(kind, twinkle_transformers.TransformersError)
    assert issubclass(kind, stdlib)
    error = pickle.loads(pickle.dumps(kind("what and why")))
    assert type(error) is kind
    assert str(error) == "what and why"


def test_the_readme_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.S)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    names["model"].close()  # pyright: ignore[reportAttributeAccessIssue]


def test_every_method_of_the_trainer_contract_is_remote() -> None:
    from twinkle_remote._decorators import remote_methods
    from twinkle_train import TrainModel

    assert TrainModel.__abstractmethods__ <= set(remote_methods(twinkle_transformers.TransformersModel))
