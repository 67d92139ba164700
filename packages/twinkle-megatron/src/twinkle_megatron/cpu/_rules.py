"""How megatron-core's sources are rewritten for a CPU: the rules, as data.

Every entry is a fact about megatron-core 0.16.1 without a GPU. A :class:`GeneralRule` rewrites a pattern wherever it occurs in
``megatron.core`` and ``mbridge``; a :class:`SpecialRule` rewrites one place of one module and must match exactly once, so that another
release of megatron-core fails loudly and never half-adapted.

``CUDA`` is the name under which a rewritten module sees the stand-in for ``torch.cuda`` (see ``_cuda_standin``); torch itself stays untouched.
"""

import re
from dataclasses import dataclass

SUPPORTED_VERSION = "0.16.1"
CUDA = "_twinkle_cuda"
PACKAGES = ("megatron.core", "mbridge")


@dataclass(frozen=True, kw_only=True)
class GeneralRule:
    """Replaces ``pattern`` by ``replacement`` wherever it occurs."""

    name: str
    pattern: re.Pattern[str]
    replacement: str
    why: str


@dataclass(frozen=True, kw_only=True)
class SpecialRule:
    """Replaces the text ``old`` by ``new`` in ``module``, where it must occur exactly once."""

    name: str
    module: str
    old: str
    new: str
    why: str


GENERAL_RULES: tuple[GeneralRule, ...] = (
    GeneralRule(
        name="tensor-type-string",
        pattern=re.compile(r"(['\"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1"),
        replacement=r"\1torch.\2Tensor\1",
        why="optimizers compare param.type() with the name of a CUDA tensor type",
    ),
    GeneralRule(
        name="torch-cuda",
        pattern=re.compile(r"(?<!from )(?<!import )\btorch\.cuda\.(?!amp\b)"),
        replacement=CUDA + ".",
        why="current_device, synchronize, Stream, Event and the RNG calls raise without CUDA",
    ),
    GeneralRule(
        name="device-keyword",
        pattern=re.compile(r"device\s*=\s*(['\"])cuda\1"),
        replacement='device="cpu"',
        why="tensors are created on the literal device 'cuda' in the optimizer, clip_grads, schedules and moe_utils",
    ),
    GeneralRule(
        name="to-cuda",
        pattern=re.compile(r"\.to\((['\"])cuda\1\)"),
        replacement='.to("cpu")',
        why="tensors are moved to the literal device 'cuda'",
    ),
    GeneralRule(
        name="pin-memory",
        pattern=re.compile(r"pin_memory=True"),
        replacement="pin_memory=False",
        why="pinned memory needs a CUDA driver",
    ),
    GeneralRule(
        name="cuda-method",
        pattern=re.compile(r"\.cuda\((?:[^()]|\(\))*\)"),
        replacement="",
        why="tensor.cuda() and module.cuda() raise without CUDA",
    ),
)

_UNEVEN_ALL_GATHER = """def _uneven_all_gather(outputs, input_, group):
    longest = max(output.shape[0] for output in outputs)
    padded = input_.new_zeros((longest,) + tuple(input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    buffers = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(buffers, padded, group=group)
    for output, buffer in zip(outputs, buffers):
        output.copy_(buffer[: output.shape[0]])


def _gather_along_first_dim("""

SPECIAL_RULES: tuple[SpecialRule, ...] = (
    SpecialRule(
        name="jit-fuser",
        module="megatron.core.jit",
        old="            jit_fuser = torch.compile",
        new="            jit_fuser = noop_decorator",
        why="on a CPU torch.compile would build every small fuser with a C++ compiler (minutes), and importing it costs seconds",
    ),
    SpecialRule(
        name="set-rng-state",
        module="megatron.core.tensor_parallel.random",
        old="    if hasattr(_C, '_cuda_setRNGState')",
        new="    return torch.set_rng_state(new_state)\n    if hasattr(_C, '_cuda_setRNGState')",
        why="dropout's RNG states are those of the CPU generator",
    ),
    SpecialRule(
        name="rng-fork-check",
        module="megatron.core.tensor_parallel.random",
        old="            if not torch.all(cpu_rng_state == torch.get_rng_state()).item():",
        new="            if False:",
        why="the tracker checks that the CPU generator stood still while it drew from the GPU's; here both are one generator",
    ),
    SpecialRule(
        name="uneven-all-gather",
        module="megatron.core.tensor_parallel.mappings",
        old="        torch.distributed.all_gather(output_tensor_list, input_, group=group)",
        new="        _uneven_all_gather(output_tensor_list, input_, group)",
        why="gloo refuses an all_gather of different lengths: pad to the longest, then trim",
    ),
    SpecialRule(
        name="uneven-all-gather-helper",
        module="megatron.core.tensor_parallel.mappings",
        old="def _gather_along_first_dim(",
        new=_UNEVEN_ALL_GATHER,
        why="the helper of the rule uneven-all-gather",
    ),
    SpecialRule(
        name="splits-to-numpy",
        module="megatron.core.transformer.moe.moe_utils",
        old="if torch.is_tensor(tensor) and tensor.is_cuda:",
        new="if torch.is_tensor(tensor):",
        why="the token dispatcher needs lists; a tensor that is already on the CPU stayed a tensor",
    ),
    SpecialRule(
        name="router-gemm",
        module="megatron.core.transformer.moe.moe_utils",
        old="class RouterGatingLinearFunction",
        new="if 'te_general_gemm' not in globals(): te_general_gemm = None\nclass RouterGatingLinearFunction",
        why="without TransformerEngine the name is never bound, and the router raises NameError",
    ),
    SpecialRule(
        name="optimizer-step-key",
        module="megatron.core.optimizer.distrib_optimizer",
        old="                dst_tensors[key].copy_(tensors[key])\n\n    def get_parameter_state_dp_reshardable",
        new=("                if key in tensors: dst_tensors[key].copy_(tensors[key])\n\n    def get_parameter_state_dp_reshardable"),
        why="torch's AdamW keeps 'step' in its state, which the saved tensors lack (KeyError on load)",
    ),
)
