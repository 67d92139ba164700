"""The training loop that megatron-core's own users write, to measure MegatronModel against: GPTModel, its DDP, its schedule and its Adam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a Llama."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int

    def hf_config(self) -> Any:
        """The same model for transformers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_query_groups,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )


class BareMegatron:
    """A model on this rank, with data that lies ready. megatron-core's parallel state and generators are there already.

    Args:
        shape: of the model, whose weights are random.
        micro_batches: token ids ``[B, T]``, on the device.
        dtype: of the parameters.
        transformer_engine: layers of TransformerEngine; otherwise local ones.
        tp_size: as in the parallel state.
    """

    def __init__(
        self, shape: Shape, micro_batches: Sequence[torch.Tensor], *, dtype: torch.dtype, transformer_engine: bool = False, tp_size: int = 1
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        on_cpu = micro_batches[0].device.type == "cpu"
        config = TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            tensor_model_parallel_size=tp_size,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=on_cpu,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=not on_cpu,
            bias_activation_fusion=not on_cpu,
            bias_dropout_fusion=not on_cpu,
            persist_layer_norm=not on_cpu,
        )
        spec = get_gpt_layer_with_transformer_engine_spec() if transformer_engine else get_gpt_layer_local_spec(normalization="RMSNorm")
        model: Any = GPTModel(
            config,
            spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=4096,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        ).to(micro_batches[0].device, dtype)
        self._chunks: Any = [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)]
        options = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.0, clip_grad=1.0, bf16=dtype is torch.bfloat16, params_dtype=dtype)
        self._optimizer: Any = get_megatron_optimizer(options, self._chunks, use_gloo_process_groups=False)
        self._batches = list(micro_batches)

    def step(self) -> float:
        """One optimizer step over all micro-batches; returns the mean loss."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        (chunk,) = self._chunks
        chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []

        def of_output(losses_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            loss = losses_BT[:, :-1].float().mean()
            losses.append(loss.detach())
            return loss, {}

        def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
            tokens_BT = next(iterator)
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
            return model(tokens_BT, positions_BT, None, labels=tokens_BT.roll(-1, 1)), of_output

        rows, tokens = self._batches[0].shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self._batches),
            model=self._chunks,
            num_microbatches=len(self._batches),
            seq_length=tokens,
            micro_batch_size=rows,
            forward_only=False,
        )
        finalize_model_grads(self._chunks)
        self._optimizer.step()
        return float(torch.stack(losses).mean())
