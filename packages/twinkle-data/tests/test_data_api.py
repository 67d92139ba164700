"""The package's surface: what it exports, what it loads, and that its errors travel."""

import pickle
import subprocess
import sys

import pytest

import twinkle_data


def test_all_is_sorted_and_everything_in_it_is_documented():
    assert twinkle_data.__all__ == sorted(twinkle_data.__all__, key=lambda name: (not name.isupper(), name))
    for name in twinkle_data.__all__:
        value = getattr(twinkle_data, name)
        assert name == "IGNORE_INDEX" or value.__doc__


def test_importing_loads_no_engine_and_no_extra():
    check = (
        "import sys, twinkle_data, twinkle_data.toy; "
        "heavy = {'torch', 'ray', 'transformers', 'tokenizers', 'datasets', 'jinja2', 'reasoning_gym'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize("name", [name for name in twinkle_data.__all__ if name.endswith("Error")])
def test_errors_share_a_base_and_pickle(name):
    error = getattr(twinkle_data, name)("what went wrong")
    assert isinstance(error, twinkle_data.DataError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what went wrong"


@pytest.mark.parametrize(
    ("blocked", "call", "line"),
    [
        ("reasoning_gym", "twinkle_data.task_dataset('chain_sum')", "pip install 'twinkle-data[tasks]'"),
        ("transformers", "twinkle_data.Template('somewhere')", "pip install 'twinkle-data[hf]'"),
        ("transformers", "twinkle_data.toy.toy_tokenizer(['a'])", "pip install 'twinkle-data[hf]'"),
    ],
)
def test_a_missing_extra_is_an_import_error_with_the_line_that_installs_it(blocked, call, line):
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Absent())
import twinkle_data.toy
try:
    {call}
except ImportError as error:
    assert isinstance(error, twinkle_data.MissingExtraError), repr(error)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
    assert line in done.stdout
