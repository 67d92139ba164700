"""The gradient norm is the true one, however large the weights are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def norms_on_rank(path: Path, options: dict[str, Any]) -> tuple[float, float, float]:
    """Of gradients that are set: the trainer's norm, the true one, and what torch makes of the largest weight alone, relative to the truth."""
    import torch
    import torch.distributed as dist

    from twinkle_data import InputFeature
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    trainer = MegatronTrainer(path, DeviceMesh.from_sizes(dp_size=dist.get_world_size(), device_type="cpu"), **options)
    try:
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("adamw", lr=0.01)
        trainer.forward_backward([InputFeature(input_ids=np.arange(3, 9))])
        trainer.export_gradients()  # they are means now, and sums of all ranks
        generator = torch.Generator().manual_seed(0)
        parameters = [p for chunk in trainer._engine._bare for p in chunk.parameters()]
        for parameter in parameters:
            parameter.main_grad.normal_(generator=generator)
        largest = max(parameters, key=lambda parameter: parameter.numel()).main_grad
        true = float(sum(parameter.main_grad.double().square().sum() for parameter in parameters) ** 0.5)
        one = float(torch.linalg.vector_norm(largest)) / float(largest.double().square().sum() ** 0.5)
        return trainer.clip_grad_norm(float("inf")), true, one
    finally:
        trainer.close()


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}], ids=str)
def test_the_norm_of_large_weights_is_true(options: dict[str, Any], pools: Any, checkpoint: Any) -> None:
    # An embedding of 12 million numbers.
    path = checkpoint("llama", vocab_size=48000, hidden_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    for norm, true, one in pools(1).run(norms_on_rank, path, options):
        assert norm == pytest.approx(true, rel=1e-6)
        assert abs(one - 1) > 1e-5, "torch's own norm is as good: these weights prove nothing"
