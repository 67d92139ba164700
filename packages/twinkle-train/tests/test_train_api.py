"""The public face of the package."""

import inspect
import pickle
import subprocess
import sys

import pytest

import twinkle_train
from twinkle_train import TrainerBase, TrainError, TrainModel, testing
from twinkle_train._remote import _BATCH_METHODS, _COLLECTIVE_METHODS


@pytest.mark.parametrize("module", [twinkle_train, testing, testing.adapters, testing.conformance, testing.plain_peft, testing.precision])
def test_exports_are_sorted_and_documented(module):
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        exported = getattr(module, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            assert exported.__doc__, f"{name} has no docstring"


def test_errors_pickle_and_show_their_message():
    errors = [value for value in vars(twinkle_train).values() if isinstance(value, type) and issubclass(value, TrainError)]
    assert len(errors) == 9
    for error in errors:
        again = pickle.loads(pickle.dumps(error("what to do")))
        assert type(again) is error
        assert str(again) == "what to do"
        if error is not TrainError:
            assert len(error.__mro__) > len(TrainError.__mro__) + 1, f"{error.__name__} is no standard error"


def test_every_method_of_the_contract_is_documented_and_remote():
    methods = {name for name in vars(TrainModel) if not name.startswith("_")}
    assert methods == set(TrainModel.__abstractmethods__)
    assert methods == set(_BATCH_METHODS) | set(_COLLECTIVE_METHODS)
    for name in methods:
        assert getattr(TrainModel, name).__doc__


def test_the_shared_base_leaves_only_engine_work_abstract():
    left = {name for name in TrainerBase.__abstractmethods__ if not name.startswith("_")}
    assert left == {"save", "load", "export_weights"}


def test_the_import_loads_neither_an_engine_nor_transformers():
    code = "import sys, twinkle_train; print([m for m in ('ray', 'transformers', 'megatron', 'vllm', 'peft', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
