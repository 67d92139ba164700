import subprocess
import sys

import pytest

ENGINES = ("torch", "ray", "vllm", "megatron", "transformers", "mbridge")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_import_twinkle_loads_no_engine():
    done = _python(f"import sys, twinkle, twinkle.utils; print([name for name in {ENGINES} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_documented_import_lines_work():
    code = """
from twinkle import remote_class, remote_function
import twinkle
from twinkle import DeviceGroup
from twinkle.utils import DeviceMesh
from twinkle.dataset import Dataset
from twinkle.dataloader import DataLoader
from twinkle.model import MegatronModel, TransformersModel
from twinkle.sampler import vLLMSampler
from twinkle.model.transformers.moe.expert_parallel import ExpertParallelConfig
config = ExpertParallelConfig(
 enabled=True, # Enable expert parallel
 router_dtype='fp32', # Router computation dtype: 'fp32', 'bf16', 'fp16'
 keep_router_logits=True, # Return router logits alongside hidden states
 ignore_shared_experts=False,# Skip shared expert computation (e.g. DeepSeek)
 ep_size=None, # EP world size (consumed by TransformersModel)
)
from twinkle.model.transformers.strategy.sequence_parallel import SequenceParallelConfig
config = SequenceParallelConfig(
 enabled=True, # Enable sequence parallel
 ulysses_size=None, # Ulysses SP degree (auto-derived from DeviceMesh if None)
 gather_logits=True, # Gather logits after forward for loss computation
)
assert twinkle.MegatronModel is MegatronModel and twinkle.vLLMSampler is vLLMSampler and twinkle.DataLoader is DataLoader
assert callable(twinkle.initialize)
from twinkle.dataset import IterablePackingDataset, PackingDataset
from twinkle import InputFeature
base_dataset = Dataset([InputFeature(input_ids=[1] * n) for n in (3, 5, 4)])
dataset = PackingDataset(
 dataset=base_dataset,
 max_length=8192,
)
assert [row.position_ids.tolist() for row in dataset] == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]], list(dataset)
assert len(list(IterablePackingDataset(dataset=base_dataset, max_length=8192))) == 1
print(MegatronModel.__module__.split('.')[0], TransformersModel.__module__.split('.')[0], vLLMSampler.__module__.split('.')[0])
"""
    done = _python(code)
    assert done.stdout.split() == ["twinkle_megatron", "twinkle_transformers", "twinkle_vllm"], done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "line"),
    [
        ("twinkle_megatron", "megatron", "MegatronModel"),
        ("twinkle_transformers", "transformers", "TransformersModel"),
        ("twinkle_vllm", "vllm", "vLLMSampler"),
    ],
)
def test_a_missing_layer_is_named_with_its_install_line(module, extra, line):
    # None in sys.modules makes an import of the module fail as if it were not installed.
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import twinkle
try:
    twinkle.{line}
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = _python(code)
    assert done.stdout.strip() == f"MissingExtraError {module} is not installed: pip install 'twinkle-rl[{extra}]'", done.stderr


def test_a_missing_module_of_a_layer_keeps_its_own_name():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == 'torch':
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import twinkle
try:
    twinkle.MegatronModel
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    done = _python(code)
    assert done.stdout.split() == ["ModuleNotFoundError", "torch"], done.stdout + done.stderr


def test_an_unknown_name_is_an_attribute_error():
    import twinkle

    with pytest.raises(AttributeError, match="no attribute 'MegatronModl'"):
        _ = twinkle.MegatronModl  # pyright: ignore[reportAttributeAccessIssue]


def test_every_public_name_resolves():
    code = """
import twinkle
missing = [name for name in twinkle.__all__ if not hasattr(twinkle, name)]
assert twinkle.__all__ == sorted(twinkle.__all__), "unsorted"
print(missing)
"""
    done = _python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_stub_names_what_the_module_exports():
    import ast
    from pathlib import Path

    import twinkle

    stub = ast.parse(Path(twinkle.__file__).with_suffix(".pyi").read_text())
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == set(twinkle.__all__)
