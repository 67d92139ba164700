"""Routers: their losses are those of one process with all rows, their logits come back, and tokens are counted, in every layout."""

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

AUX, Z = 0.5, 0.05
# Absolute, float32: a few roundings of gradients up to 0.5, of router logits up to 2, of losses up to 10.
GRADIENTS, LOGITS, LOSSES = 2e-6, 1e-5, 5e-6


def plain(path: Path, rows: list[Any]) -> dict[str, Any]:
    """What transformers makes of each row alone, and of the routers' logits of all rows together."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    weights = [torch.as_tensor(np.where(row.labels == -100, 0.0, row.loss_weights)[1:], dtype=torch.float32) for row in rows]
    loss, logits = torch.zeros(()), []
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.as_tensor(row.input_ids)[None]
        out = model(ids, use_cache=False, output_router_logits=True)
        of_row = (out.logits[0, :-1] / row.temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        loss = loss - (of_row * weight).sum() / sum(each.sum() for each in weights)
        logits.append(out.router_logits)
    together: Any = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    config = model.config
    num_experts = together[0].shape[-1]
    aux: Any = load_balancing_loss_func(together, num_experts, config.num_experts_per_tok)
    z = torch.cat(together).logsumexp(-1).square().mean()
    (loss + AUX * aux + Z * z).backward()
    counts = sum(torch.bincount(layer.topk(config.num_experts_per_tok).indices.flatten(), minlength=num_experts) for layer in together)
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if ".experts." not in name}
    return {
        "aux": aux.item(),
        "z": z.item(),
        "loss": loss.item(),
        "counts": counts.tolist(),  # pyright: ignore[reportAttributeAccessIssue]
        "logits": [torch.stack(each, 1).detach().numpy() for each in logits],
        "gradients": gradients,
    }


def routed_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any], how: dict[str, Any], fault: bool) -> dict[str, Any]:
    """Runs on every rank: one call, in pieces as `how` says."""
    from twinkle_data import InputProcessor
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers import ExpertParallelConfig
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    trainer = TransformersTrainer(path, mesh, expert_parallel=ExpertParallelConfig(), router_aux_loss_coef=AUX, router_z_loss_coef=Z, **options)
    with ExitStack() as stack:
        stack.callback(trainer.close)
        if fault:  # each rank counts its own tokens only
            trainer._routers._everyone = None
        trainer.set_processor(InputProcessor(pad_token_id=0, **how["processing"]))
        trainer.set_loss("cross_entropy")
        share = rows[mesh.get_slice(len(rows), rank)]
        if how["micro_batch_size"] is None:
            out = trainer.forward(share)
            trainer.forward_only(share)  # changes nothing about what backward adds
            loss = trainer.calculate_loss()
            trainer.backward()
        else:
            out = trainer.forward_backward(share, how["micro_batch_size"])
            loss = out.loss
        gradients = trainer.export_gradients()
        return {
            "representatives": mesh.representatives(),
            "gradients": {name: value for name, value in gradients.items() if ".experts." not in name},
            "metrics": trainer.calculate_metric(),
            "again": trainer.calculate_metric(),
            "loss": loss,
            "logits": out.router_logits,
        }


FREE, RIGHT = {"padding_free": True}, {}
# name: ranks, family, sizes of the mesh, options, the processor's, rows of a micro-batch, whether it runs by default.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], dict[str, Any], int | None, bool]] = {
    "one process": (1, "olmoe", {}, {}, FREE, 3, False),
    # A rank has fewer rows, and a micro-batch of nothing.
    "dp2 ep2": (2, "qwen3_moe", {"dp_size": 2, "ep_size": 2}, {}, RIGHT, 1, True),
    "dp2": (2, "olmoe", {"dp_size": 2}, {}, RIGHT, None, False),
    "fsdp2 ep2, recomputed": (2, "gpt_oss", {"fsdp_size": 2, "ep_size": 2}, {"activation_checkpointing": True}, FREE, 2, True),
    "ulysses2": (2, "qwen3_moe", {"ulysses_size": 2}, {}, FREE, None, True),
    "ring2 ep2": (2, "qwen3_moe", {"cp_size": 2, "ep_size": 2}, {}, FREE, 4, False),
    "dp2 ulysses2 ep2": (4, "qwen3_moe", {"dp_size": 2, "ulysses_size": 2, "ep_size": 2}, {}, RIGHT, 2, False),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if row[6] else (pytest.mark.full,), id=n) for n, row in LAYOUTS.items()])
def test_losses_logits_and_counts_of_routers_are_those_of_one_process(name: str, pools: Any, checkpoint: Any, features: list[Any]) -> None:
    ranks, family, sizes, options, processing, micro_batch_size, _ = LAYOUTS[name]
    path = checkpoint(family)
    want = plain(path, features)
    how = {"processing": processing, "micro_batch_size": micro_batch_size}
    for fault in (False, True) if ranks > 1 else (False,):
        results = pools(ranks).run(routed_on_rank, path, features, sizes, options, how, fault, timeout_s=120)
        gap = max(float(np.abs(value - want["gradients"][key]).max()) for key, value in results[0]["gradients"].items())
        if fault:
            assert gap > 100 * GRADIENTS
            continue
        logits = [row for rank in results[0]["representatives"] for row in results[rank]["logits"]]
        assert len(logits) == len(features)
        metrics = results[0]["metrics"]
        found = {
            "gradients": gap,
            "logits": max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(logits, want["logits"], strict=True)),
            "losses": max(abs(metrics[f"moe_{key}_loss"] - want[key]) for key in ("aux", "z")) + abs(results[0]["loss"] - want["loss"]),
        }
        print(name, found)
        assert found["gradients"] < GRADIENTS, found
        assert found["logits"] < LOGITS, found
        assert found["losses"] < LOSSES, found
        assert [metrics[f"moe_tokens_expert_{index}"] for index in range(len(want["counts"]))] == want["counts"]
        assert metrics["moe_load_max"] >= 1 >= metrics["moe_load_min"] >= 0
        assert all(result["metrics"] == metrics for result in results)
        assert not [key for key in results[0]["again"] if key.startswith("moe_")]


def test_padding_and_untrained_sequences_are_not_counted(checkpoint: Any, features: list[Any]) -> None:
    from dataclasses import replace

    from twinkle_data import InputProcessor
    from twinkle_transformers import TransformersModel

    path = checkpoint("qwen3_moe")
    untrained = replace(features[1], labels=np.full(len(features[1].labels), -100))
    model = TransformersModel(path, router_aux_loss_coef=AUX)
    model.set_processor(InputProcessor(pad_token_id=0))
    model.set_loss("cross_entropy")
    found: list[dict[str, float]] = []
    for rows in ([features[0]], [features[0], untrained, features[0]]):
        model.forward_backward(rows)
        found.append(model.calculate_metric())
    model.close()
    assert found[0]["moe_aux_loss"] == pytest.approx(found[1]["moe_aux_loss"], abs=1e-6)
    assert sum(value for name, value in found[0].items() if name.startswith("moe_tokens")) == 2 * 2 * len(features[0])
    assert found[1]["moe_tokens_expert_1"] == 2 * found[0]["moe_tokens_expert_1"]


def test_a_checkpoint_that_asks_for_the_loss_has_it_and_others_do_not(checkpoint: Any, features: list[Any]) -> None:
    from twinkle_transformers import TransformersModel

    for asked in (False, True):
        model = TransformersModel(checkpoint("qwen3_moe", output_router_logits=asked, router_aux_loss_coef=0.25))
        model.set_loss("cross_entropy")
        out = model.forward_backward(features[:2])
        metrics = model.calculate_metric()
        model.close()
        assert ("moe_aux_loss" in metrics) == asked
        assert out.router_logits is None


def test_what_has_no_such_loss_is_refused(checkpoint: Any, features: list[Any]) -> None:
    from twinkle_train import ConfigError, LossOutput
    from twinkle_transformers import TransformersModel

    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM has no auxiliary loss"):
        TransformersModel(checkpoint("deepseek_v3"), router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no routers that are understood"):
        TransformersModel(checkpoint("qwen3"), router_z_loss_coef=0.1)
    with pytest.raises(ConfigError, match=re.escape("must be >= 0, got -1.0 and 0.0")):
        TransformersModel(checkpoint("qwen3_moe"), router_aux_loss_coef=-1.0)
    model = TransformersModel(checkpoint("qwen3_moe"), router_aux_loss_coef=0.1)
    model.set_loss(lambda inputs: LossOutput(-inputs.logprobs_BT.sum(), torch.ones(())))
    with pytest.raises(ConfigError, match="losses of the routers are weighed by tokens"):
        model.forward_backward(features[:2])
    model.zero_grad()
    model.forward(features[:2])
    model.calculate_loss()
    with pytest.raises(ConfigError, match="losses of the routers are weighed by tokens"):
        model.backward()
    model.close()
