"""Every layout and form of a batch gives what plain PyTorch makes of each sequence alone; each row has a fault that must be noticed."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# fp32, largest absolute differences: a few roundings of logits of size 10, of losses of size 6, of gradients up to 0.5; of the norm relative.
LOSS, LOGPROBS, GRADIENTS, NORM = 1e-6, 1e-5, 2e-6, 1e-6
SGD_LR = 0.1

# How rows are given and collated: which rows go into one PackedFeature, options of the processor, rows of a micro-batch.
FORMS: dict[str, tuple[list[int], dict[str, Any], int | None]] = {
    "right": ([1] * 7, {}, 2),
    "left": ([1] * 7, {"padding_side": "left"}, 2),
    "free": ([1] * 7, {"padding_free": True}, 4),
    "packed": ([2, 3, 1, 1], {"alignment": 8}, 2),
}


def measure_on_rank(
    path: Path, rows: Sequence[Any], sizes: dict[str, Any], forms: dict[str, Any], options: dict[str, Any], fault: str | None = None
) -> dict[str, Any]:
    """Runs on every rank: for each form of the same rows log-probabilities, loss and gradients; and weights after a step of SGD."""
    from twinkle_data import InputProcessor, PackedFeature
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers import ExpertParallelConfig, SequenceParallelConfig
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    rank = int(os.environ["RANK"])
    if "sequence_parallel" in options:
        options = options | {"sequence_parallel": SequenceParallelConfig(**options["sequence_parallel"])}
    if "expert_parallel" in options:
        options = options | {"expert_parallel": ExpertParallelConfig(**options["expert_parallel"])}
    trainer = TransformersTrainer(path, mesh, **options)
    with ExitStack() as stack:
        stack.callback(trainer.close)
        _break(trainer, fault, stack)
        trainer.set_loss("cross_entropy")
        trainer.set_optimizer("sgd", lr=SGD_LR)
        results: dict[str, Any] = {"representatives": mesh.representatives()}
        for name, (counts, processing, micro_batch_size) in forms.items():
            ends = np.cumsum(counts)
            packs = [list(rows[end - count : end]) for count, end in zip(counts, ends, strict=True)]
            given = [pack[0] if len(pack) == 1 else PackedFeature(features=pack) for pack in packs]
            share = given[mesh.get_slice(len(given), rank)]
            trainer.set_processor(InputProcessor(pad_token_id=0, **processing))
            logprobs = trainer.forward_only(share, micro_batch_size).logprobs
            loss = trainer.forward_backward(share, micro_batch_size).loss
            gradients = trainer.export_gradients()
            results[name] = {"logprobs": logprobs, "loss": loss, "gradients": gradients, "norm": trainer.clip_grad_norm(float("inf"))}
            if name != list(forms)[-1]:
                trainer.zero_grad()
        trainer.step()
        return results | {"sgd": trainer.export_weights()}


def _break(trainer: Any, fault: str | None, stack: ExitStack) -> None:
    """Leaves out what a layout or a form stands on."""
    import dataclasses

    from torch.distributed.fsdp import FSDPModule

    groups = trainer._groups_of_mesh
    if fault == "no sum over replicas":
        groups.replicas = None
    elif fault == "norm of one shard":
        groups.shard = None
    elif fault == "means of shards, not sums":
        for module in trainer._model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
    elif fault == "shares stay apart":
        attention = trainer._attention
        attention.makes_masks = False
        attention.distribute = lambda whole, module, tensors, plan, options: whole(module, *tensors, None, **options | {"position_ids": None})
    elif fault == "experts of the wrong rank":
        from twinkle_transformers import _expert_parallel

        own = _expert_parallel.preprocess
        stack.callback(setattr, _expert_parallel, "preprocess", own)
        _expert_parallel.preprocess = lambda index, number, group: own((index + number // 2) % number, number, group)
    elif fault == "no sum over expert replicas":
        groups.expert_replicas = None
    elif fault == "frequencies of the longest":
        trainer._attention._undo_rotary()
    elif fault in ("states go on", "columns in another order"):
        logits = trainer._logits

        def wrong(runs: Any) -> Any:
            return (
                dataclasses.replace(runs, bounds=(0, runs.bounds[-1]))
                if fault == "states go on"
                else (dataclasses.replace(runs, place_BT=runs.place_BT.flip(1)))
            )

        trainer._logits = lambda inputs: logits(dataclasses.replace(inputs, runs=wrong(inputs.runs)))
    elif fault == "sequences see one another":
        of = trainer._attention.of
        trainer._attention.of = lambda rows: of(dataclasses.replace(rows, sequence_ids_BT=None, segments=()))


def differences(results: list[dict[str, Any]], form: str, want: dict[str, Any]) -> dict[str, float]:
    have = np.concatenate([row for rank in results[0]["representatives"] for row in results[rank][form]["logprobs"]])
    gradients = results[0][form]["gradients"]
    # Buffers have none.
    assert gradients.keys() == {name for name in want["gradients"] if not name.endswith(("e_score_correction_bias", "tid2eid", "ffn.gate.bias"))}
    return {
        "logprobs": float(np.abs(have - np.concatenate(want["logprobs"])).max()),
        "loss": max(abs(result[form]["loss"] - want["loss"]) for result in results),
        "gradients": max(float(np.abs(value - want["gradients"][name]).max()) for name, value in gradients.items()),
        "norm": max(abs(result[form]["norm"] / want["norm"] - 1) for result in results),
    }


def worst(results: list[dict[str, Any]], forms: Any, want: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """How many times what is allowed the worst difference is, and all of them."""
    found: dict[str, Any] = {form: differences(results, form, want) for form in forms}
    found["sgd"] = max(float(np.abs(value - want["sgd"][name]).max()) for name, value in results[0]["sgd"].items())
    allowed = {"logprobs": LOGPROBS, "loss": LOSS, "gradients": GRADIENTS, "norm": NORM}
    # A weight of size 1 is rounded once more.
    ratios = [found["sgd"] / (SGD_LR * GRADIENTS + 2.5e-7)] + [found[form][name] / allowed[name] for form in forms for name in allowed]
    return max(ratios), found


STATES, ORDER = "states go on", "columns in another order"
LEAK, APART, LONGEST = "sequences see one another", "shares stay apart", "frequencies of the longest"
ALL = tuple(FORMS)
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
# What a family's name may stand for: the family, and sizes that differ from those of the zoo.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 mqa": ("qwen3", {"num_key_value_heads": 1}),
    "llama dynamic": ("llama", {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 8, "rope_parameters": _LONG}),
    "llama 6 heads": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
}
WRONG = "experts of the wrong rank"
EP: dict[str, Any] = {"dp_size": 2, "ep_size": 2}
ULYSSES, RING = {"ulysses_size": 2}, {"cp_size": 2}
# name: ranks, family, sizes of the mesh, options, forms, fault that must be noticed, whether it runs by default.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], tuple[str, ...], str, bool]] = {
    "ulysses2": (2, "qwen3", ULYSSES, {}, ALL, APART, True),
    "ulysses2 eager mqa": (2, "qwen3 mqa", ULYSSES, {"attn_implementation": "eager"}, ("right", "packed"), LEAK, True),
    "ulysses2 gpt_oss": (2, "gpt_oss", ULYSSES, {}, ("left", "packed"), APART, True),
    "ulysses2 gemma2": (2, "gemma2", ULYSSES, {}, ("left", "packed"), APART, False),
    "ulysses2 mistral, recomputed": (2, "mistral", ULYSSES, {"activation_checkpointing": True}, ALL, APART, True),
    "ulysses2 deepseek_v3": (2, "deepseek_v3", ULYSSES, {}, ALL, APART, False),
    "ulysses2 whole logits": (2, "qwen2", ULYSSES, {"sequence_parallel": {"gather_logits": True}}, ("packed",), APART, True),
    "ulysses2 phi3 longrope": (2, "phi3 longrope", ULYSSES, {}, ("left", "packed"), LONGEST, True),
    "ring2 llama dynamic": (2, "llama dynamic", RING, {}, ("right", "packed"), LONGEST, False),
    "ring2": (2, "qwen3", RING, {}, ALL, APART, True),
    "ring2 eager, recomputed": (2, "llama", RING, {"attn_implementation": "eager", "activation_checkpointing": True}, ("packed",), APART, True),
    "ring2 deepseek_v3": (2, "deepseek_v3", RING, {}, ("right", "packed"), APART, True),
    "ring2 by choice": (2, "qwen2", ULYSSES, {"sequence_parallel": {"ulysses_size": 1}}, ("free",), APART, False),
    "ulysses4": (4, "qwen3", {"ulysses_size": 4}, {}, ALL, APART, False),
    "ulysses2 ring2": (4, "qwen3", {"ulysses_size": 2, "cp_size": 2}, {}, ALL, APART, False),
    "ulysses4 of 6 heads": (4, "llama 6 heads", {"ulysses_size": 4}, {}, ALL, APART, False),
    "ring4": (4, "llama", {"cp_size": 4}, {}, ALL, APART, False),
    "dp2 ulysses2": (4, "qwen3", {"dp_size": 2, **ULYSSES}, {}, ("right", "packed"), "no sum over replicas", False),
    "fsdp2 ulysses2, recomputed": (4, "qwen3", {"fsdp_size": 2, **ULYSSES}, {"activation_checkpointing": True}, ("left", "packed"), APART, False),
    "fsdp2 ring2": (4, "qwen3", {"fsdp_size": 2, **RING}, {}, ("packed",), "norm of one shard", False),
    "one sdpa": (1, "qwen3", {}, {}, ("right", "left", "free", "packed"), LEAK, True),
    "one eager": (1, "qwen3", {}, {"attn_implementation": "eager"}, ("right", "left", "free", "packed"), LEAK, True),
    "one, recomputed": (1, "mistral", {}, {"activation_checkpointing": True}, ("free", "packed"), LEAK, True),
    "one llama dynamic": (1, "llama dynamic", {}, {}, ("right", "packed"), LONGEST, True),
    "one phi3 longrope": (1, "phi3 longrope", {}, {}, ("left", "free", "packed"), LONGEST, False),
    "one gpt_oss": (1, "gpt_oss", {}, {}, ("left", "free", "packed"), LEAK, True),
    "one afmoe": (1, "afmoe", {}, {}, ("left", "free", "packed"), LEAK, True),
    "one qwen3_next": (1, "qwen3_next", {}, {}, ("left", "free", "packed"), STATES, True),
    "one qwen3_5_text, recomputed": (1, "qwen3_5_text", {}, {"activation_checkpointing": True}, ("right", "packed"), STATES, False),
    "fsdp2 qwen3_5_text": (2, "qwen3_5_text", {"fsdp_size": 2}, {}, ("packed",), STATES, False),
    "ulysses2 qwen3_next, recomputed": (2, "qwen3_next", ULYSSES, {"activation_checkpointing": True}, ALL, ORDER, True),
    "ring2 qwen3_5_text": (2, "qwen3_5_text", RING, {}, ("right", "packed"), ORDER, True),
    "ulysses2 ring2 qwen3_next": (4, "qwen3_next", {"ulysses_size": 2, "cp_size": 2}, {}, ALL, ORDER, False),
    "ep2 ulysses2 qwen3_5_moe_text": (2, "qwen3_5_moe_text", {**ULYSSES, "ep_size": 2}, {}, ("left", "packed"), WRONG, False),
    "ep2 qwen3_5_moe_text": (2, "qwen3_5_moe_text", EP, {}, ("free",), STATES, False),
    "dp2": (2, "qwen3", {"dp_size": 2}, {}, ("right", "packed"), "no sum over replicas", True),
    "fsdp2": (2, "qwen3", {"fsdp_size": 2}, {}, ("right", "packed"), "norm of one shard", True),
    "fsdp2, recomputed": (2, "llama", {"fsdp_size": 2}, {"activation_checkpointing": True}, ("free",), "means of shards, not sums", True),
    "ep2 qwen3_moe": (2, "qwen3_moe", EP, {}, ("right", "packed"), WRONG, True),
    "ep2 qwen2_moe": (2, "qwen2_moe", EP, {}, ("free",), WRONG, False),
    "ep2 mixtral": (2, "mixtral", EP, {}, ("right",), WRONG, False),
    "ep2 deepseek_v3": (2, "deepseek_v3", EP, {}, ("right", "packed"), WRONG, True),
    "ep2 glm4_moe": (2, "glm4_moe", EP, {}, ("right",), WRONG, False),
    "ep2 olmoe": (2, "olmoe", EP, {}, ("right",), WRONG, False),
    "ep2 afmoe": (2, "afmoe", EP, {}, ("right",), WRONG, False),
    "ep2 listed_moe": (2, "listed_moe", EP, {"trust_remote_code": True}, ("right", "packed"), WRONG, True),
    "ep2 fsdp2 listed_moe, recomputed": (
        2,
        "listed_moe",
        {"fsdp_size": 2, "ep_size": 2},
        {"trust_remote_code": True, "activation_checkpointing": True},
        ("free",),
        "norm of one shard",
        False,
    ),
    "ep2 ep_fsdp2 listed_moe": (
        4,
        "listed_moe",
        {"world_size": 4, "ep_size": 2, "ep_fsdp_size": 2},
        {"trust_remote_code": True},
        ("right",),
        WRONG,
        False,
    ),
    "ep2 nemotron_h": (2, "nemotron_h", EP, {}, ("right",), WRONG, False),
    "ep2 deepseek_v4": (2, "deepseek_v4", EP, {}, ("right",), WRONG, False),
    "ep2 gpt_oss, recomputed": (2, "gpt_oss", EP, {"activation_checkpointing": True}, ("left", "packed"), WRONG, True),
    "ep2 fsdp2": (2, "qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, {}, ("right",), "norm of one shard", True),
    "ep2 ulysses2": (2, "qwen3_moe", {**ULYSSES, "ep_size": 2}, {}, ("right", "packed"), WRONG, True),
    "ep2 ring2": (2, "qwen3_moe", {**RING, "ep_size": 2}, {}, ("packed",), WRONG, False),
    "ep_fsdp2": (2, "qwen3_moe", {"dp_size": 2, "ep_fsdp_size": 2}, {}, ("right",), "no sum over replicas", False),
    "ep2 ep_fsdp2": (4, "qwen3_moe", {"world_size": 4, "ep_size": 2, "ep_fsdp_size": 2}, {}, ("right",), WRONG, False),
    "ep2 dp4": (4, "deepseek_v3", {"dp_size": 4, "ep_size": 2}, {}, ("right",), "no sum over expert replicas", False),
    "ep2 dp2 ulysses2, recomputed": (
        4,
        "qwen2_moe",
        {"dp_size": 2, **ULYSSES, "ep_size": 2},
        {"activation_checkpointing": True},
        ("packed",),
        WRONG,
        False,
    ),
    "dp2 fsdp2": (4, "qwen3", {"dp_size": 2, "fsdp_size": 2}, {}, ("right", "free"), "no sum over replicas", False),
    "fsdp4": (4, "qwen2", {"fsdp_size": 4}, {}, ("right",), "norm of one shard", False),
    "dp2 qwen3_moe": (2, "qwen3_moe", {"dp_size": 2}, {}, ("right",), "no sum over replicas", False),
    "fsdp2 deepseek_v3": (2, "deepseek_v3", {"fsdp_size": 2}, {}, ("packed",), "norm of one shard", False),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if row[6] else (pytest.mark.full,), id=n) for n, row in LAYOUTS.items()])
def test_a_layout_equals_plain_pytorch_and_its_fault_is_noticed(name: str, pools: Any, expected: Any, features: list[Any]) -> None:
    ranks, family, sizes, options, names, fault, _ = LAYOUTS[name]
    family, changed = VARIANTS.get(family, (family, {}))
    path, want = expected(family, **changed)
    forms = {form: FORMS[form] for form in names}
    ratio, found = worst(pools(ranks).run(measure_on_rank, path, features, sizes, forms, options, timeout_s=120), forms, want)
    print(name, found)
    assert ratio <= 1, found
    last = dict([list(forms.items())[-1]])
    ratio, found = worst(pools(ranks).run(measure_on_rank, path, features, sizes, last, options, fault, timeout_s=120), last, want)
    assert ratio > 100, (fault, found)


# The documented meshes of eight ranks, with the documented configurations.
DOCUMENTED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "ep": (
        "qwen3_moe",
        {"world_size": 8, "dp_size": 4, "ep_size": 2},
        {"expert_parallel": {"enabled": True, "router_dtype": "fp32", "keep_router_logits": True, "ignore_shared_experts": False, "ep_size": None}},
        "right",
    ),
    "ep and fsdp": ("qwen3_moe", {"world_size": 8, "dp_size": 2, "ep_size": 2, "ep_fsdp_size": 2}, {}, "right"),
    "sp": (
        "qwen3",
        {"world_size": 8, "dp_size": 2, "ulysses_size": 4},
        {"sequence_parallel": {"enabled": True, "ulysses_size": None, "gather_logits": True}},
        "packed",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_meshes_train_as_plain_pytorch_on_eight_ranks(name: str, pools: Any, plain: Any, checkpoint: Any, features: list[Any]) -> None:
    family, sizes, options, form = DOCUMENTED[name]
    rows = [*features, *features[1:4]]  # each of eight data ranks needs one
    path = checkpoint(family)
    forms = {form: ([1] * 10, {}, None) if form == "right" else ([3, 2, 4, 1], {}, 1)}
    ratio, found = worst(pools(8).run(measure_on_rank, path, rows, sizes, forms, options, timeout_s=400), forms, plain(path, rows))
    pools(8).stop()
    assert ratio <= 1, found
