"""flash-linear-attention's kernels, called as TransformersModel calls them on a GPU, under Triton's interpreter: beside the torch ones.

flash-linear-attention is not installed for development, since transformers would then call it on CPUs, too:
`pip install --no-deps --target DIR flash-linear-attention fla-core einops`, and `PYTHONPATH=DIR ./dev test --full .../test_transformers_fla.py`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs in a process of its own: the interpreter is chosen when Triton is imported.
SCRIPT = '''
import builtins, itertools, sys
import numpy as np
import torch
import triton.language as tl
import triton.runtime.autotuner
from triton.runtime.interpreter import TensorHandle

# Nothing is measured, the first configuration is taken.
triton.runtime.autotuner.Autotuner._bench = lambda self, *inputs, config, **options: [0.0] * 3
triton.runtime.autotuner.Autotuner.do_bench = property(lambda self: lambda *inputs, **options: [0.0] * 3)

class Number(int):
    """The loop counter of an interpreted kernel, which Triton 3.7 makes a plain int."""
    def to(self, dtype):
        return tl.core.tensor(TensorHandle(np.array([int(self)], dtype=np.int64), tl.int64), tl.int64)

def counted(*bounds):
    bounds = [int(each.handle.data.item()) if isinstance(each, tl.core.tensor) else int(getattr(each, "value", each)) for each in bounds]
    return map(Number, builtins.range(*bounds))

import fla.modules.convolution, fla.ops.gated_delta_rule
for name, module in list(sys.modules.items()):
    if name.startswith("fla.ops.common.chunk_delta_h"):
        module.range = counted

from twinkle_transformers import _gated_delta as ours
from types import SimpleNamespace
import transformers.models.qwen3_next.modeling_qwen3_next as modeling

torch.manual_seed(0)
bounds, heads, size = (0, 5, 14, 90), 2, 16
layer = modeling.Qwen3NextGatedDeltaNet.__new__(modeling.Qwen3NextGatedDeltaNet)
torch.nn.Module.__init__(layer)
layer.activation = "silu"
tensors = [torch.randn(1, bounds[-1], heads, size, requires_grad=True) for _ in range(3)]
weights = [torch.randn(heads, size, 4, requires_grad=True) for _ in range(3)]
decay, beta = (-torch.rand(1, bounds[-1], heads)).requires_grad_(), torch.rand(1, bounds[-1], heads, requires_grad=True)
leaves = [*tensors, *weights, decay, beta]
found = []
for kernels in (False, True):
    ours._has_kernels = lambda tensor: kernels
    query, key, value = ours._convolved(layer, tensors, weights, None, bounds)
    out = ours._recurrence(layer, query, key, value, decay, beta, bounds)
    found.append([out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves)])
gaps = [float((mine - theirs).abs().max() / theirs.abs().max()) for theirs, mine in zip(*found)]
print(gaps)
assert max(gaps) < 1e-4, gaps
'''


@pytest.mark.full
@pytest.mark.timeout(500)
def test_kernels_of_flash_linear_attention_give_what_torch_gives(tmp_path: Path) -> None:
    if importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    script = tmp_path / "interpreted.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=480)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
