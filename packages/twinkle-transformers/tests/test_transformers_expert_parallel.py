"""Expert parallelism by itself: on bare models, ModuleList blocks, the router's type and logits, idle ranks, what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from twinkle_train import ConfigError
from twinkle_transformers import ExpertParallelConfig, LayoutError, UnsupportedModelError, apply_expert_parallel, router_logits
from twinkle_transformers._expert_parallel import preprocess

HIDDEN, WIDTH = 16, 24


class Expert(nn.Module):
    """One expert of a block as remote code writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """A block of experts in a ModuleList, with a gated shared one, that loops over those that were chosen."""

    def __init__(self, num_experts: int = 4, *, sigmoid: bool = False) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob, self.sigmoid = 2, True, sigmoid
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.shared_expert, self.shared_expert_gate = Expert(), nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden.view(-1, HIDDEN)
        logits = self.gate(tokens)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view(hidden.shape), logits


def a_block(**options: Any) -> Any:
    torch.manual_seed(0)
    block = Block(**options)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(3)
    return block


def module_list_on_rank(one_sided: bool) -> dict[str, Any]:
    """Runs on two ranks: a ModuleList block divided over both, against the whole one; the tokens of both ranks are known to each."""
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.manual_seed(1)
    tokens = torch.randn(2, 1, 6, HIDDEN)
    whole, divided = a_block(), a_block()
    if one_sided:  # all tokens go to the first rank's experts
        tokens = tokens.abs()
        with torch.no_grad():
            for block in (whole, divided):
                block.gate.weight.abs_()
                block.gate.weight[2:] *= -1
    apply_expert_parallel(divided, dist.group.WORLD, ExpertParallelConfig())
    want = [whole(tokens[index])[0] for index in range(2)]
    sum(each.square().sum() for each in want).backward()  # pyright: ignore[reportAttributeAccessIssue]
    have, logits = divided(tokens[rank])
    have.square().sum().backward()
    gaps = [_gap(have, want[rank]), _gap(logits, whole.gate(tokens[rank].view(-1, HIDDEN)))]
    for mine, theirs in zip(divided.experts, whole.experts[2 * rank : 2 * rank + 2], strict=True):
        for name, parameter in mine.named_parameters():
            other = theirs.get_parameter(name).grad
            gaps.append(_gap(parameter.grad, torch.zeros_like(parameter) if other is None else other))
    came = preprocess(whole.gate(tokens[rank].view(-1, HIDDEN)).topk(2).indices, 4, dist.group.WORLD)
    kept = router_logits(divided)
    return {"gap": max(gaps), "came": len(came.expert_ids_M), "held": len(divided.experts), "logits": [tuple(each.shape) for each in kept]}


def _gap(mine: Any, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("one_sided", [False, True])
def test_a_module_list_of_experts_is_divided_also_where_a_rank_gets_no_tokens(one_sided: bool, two_ranks: Any) -> None:
    results = two_ranks.run(module_list_on_rank, one_sided, timeout_s=120)
    # A few roundings.
    assert max(result["gap"] for result in results) < 2e-6
    assert [result["held"] for result in results] == [2, 2]
    assert sum(result["came"] for result in results) == 24
    assert (results[1]["came"] == 0) == one_sided
    assert all(result["logits"] == [(6, 4)] for result in results)


def test_a_block_that_routes_otherwise_is_found_out() -> None:
    block, tokens = a_block(sigmoid=True), torch.randn(1, 3, HIDDEN)
    want = block(tokens)[0]
    with pytest.raises(UnsupportedModelError, match="Block routes tokens in a way that is not known"):
        apply_expert_parallel(block, None)
    assert torch.equal(block(tokens)[0], want)  # it is as it was


def test_blocks_that_are_not_understood_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self, router: bool) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(2)) if not router else Expert()
            if router:
                self.router = nn.Linear(HIDDEN, 2)

    with pytest.raises(UnsupportedModelError, match="Odd has experts, but neither a gate nor a router"):
        apply_expert_parallel(Odd(router=False), None)
    with pytest.raises(UnsupportedModelError, match="Odd has experts of Expert, which is neither a ModuleList nor called as"):
        apply_expert_parallel(Odd(router=True), None)
    with pytest.raises(UnsupportedModelError, match="Linear has no experts to divide"):
        apply_expert_parallel(nn.Linear(2, 2), None)


def test_wrong_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="router_dtype is 'fp32', 'bf16', 'fp16', not 'float'"):
        ExpertParallelConfig(router_dtype="float")
    with pytest.raises(ConfigError, match="expert parallelism is not enabled"):
        apply_expert_parallel(a_block(), None, ExpertParallelConfig(enabled=False))
    with pytest.raises(LayoutError, match="has ep_size=2, the mesh has 1"):
        apply_expert_parallel(a_block(), None, ExpertParallelConfig(ep_size=2))


def test_the_routers_type_governs_its_product(checkpoint: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = checkpoint("qwen3_moe")
    ids = torch.arange(3, 13)[None]
    logits: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        want = model(ids, use_cache=False).logits
        apply_expert_parallel(model, None, ExpertParallelConfig(router_dtype=dtype))
        logits[dtype] = model(ids, use_cache=False).logits
        assert [each.dtype for each in router_logits(model)] == [torch.float32 if dtype == "fp32" else torch.bfloat16] * 2
        assert [tuple(each.shape) for each in router_logits(model)] == [(10, 4)] * 2
        if dtype == "fp32":
            assert (logits["fp32"] - want).abs().max() < 1e-5
    assert (logits["bf16"] - logits["fp32"]).abs().max() > 1e-4


def test_shared_experts_can_be_left_out(checkpoint: Any) -> None:
    from transformers import AutoModelForCausalLM

    path, ids = checkpoint("deepseek_v3"), torch.arange(3, 13)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    apply_expert_parallel(model, None, ExpertParallelConfig(ignore_shared_experts=True, keep_router_logits=False))
    have = model(ids, use_cache=False).logits
    assert router_logits(model) == []
    without: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        without.model.layers[1].mlp.shared_experts.down_proj.weight.zero_()
    assert (have - without(ids, use_cache=False).logits).abs().max() < 1e-5


def trained_on_rank(path: Path, rows: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs on two ranks: saves, resumes and refuses."""
    import torch.distributed as dist

    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(dp_size=2, ep_size=2, device_type="cpu")
    trainer = TransformersTrainer(path, mesh)
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("adamw", lr=1e-2)
    share = rows[mesh.get_slice(len(rows), dist.get_rank())]
    trainer.forward_backward(share, 2)
    trainer.clip_grad_and_step()
    trainer.save_checkpoint(options["states"])
    trainer.save(options["saved"])
    weights = trainer.export_weights()
    trainer.close()
    whole = TransformersTrainer(path, DeviceMesh.from_sizes(dp_size=2, device_type="cpu"))
    whole.resume_from_checkpoint(options["states"])
    resumed = whole.export_weights()
    whole.set_loss("cross_entropy")
    whole.forward_backward(share, 2)
    norm = whole.clip_grad_and_step()
    whole.close()
    message = ""
    try:
        TransformersTrainer(options["odd"], mesh)
    except LayoutError as error:
        message = str(error)
    return {"weights": weights, "resumed": resumed, "norm": norm, "message": message}


@pytest.mark.timeout(300)
def test_experts_are_saved_whole_and_a_checkpoint_is_resumed_without_dividing_them(
    two_ranks: Any, checkpoint: Any, features: list[Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    options = {"states": tmp_path / "states", "saved": tmp_path / "saved", "odd": checkpoint("qwen3_moe", num_experts=3)}
    results = two_ranks.run(trained_on_rank, checkpoint("qwen3_moe"), features, options, timeout_s=120)
    weights = results[0]["weights"]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in weights
    assert weights.keys() == results[0]["resumed"].keys()
    assert all(np.array_equal(weights[name], results[0]["resumed"][name]) for name in weights)
    assert results[0]["norm"] == results[1]["norm"] > 0
    assert re.match("ep_size=2 does not divide the 3 experts of Qwen3MoeSparseMoeBlock", results[0]["message"])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    fused = saved.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert np.array_equal(fused[3].detach().numpy(), weights["model.layers.1.mlp.experts.3.down_proj.weight"])


def listed_on_rank(path: Path, rows: list[Any], folder: Path) -> dict[str, Any]:
    """Runs on two ranks: what a model with a ModuleList saves is loaded again, divided or not."""
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    whole = TransformersTrainer(path, DeviceMesh.from_sizes(dp_size=2, device_type="cpu"), trust_remote_code=True)
    start = whole.export_weights()
    whole.close()
    trainer = TransformersTrainer(path, DeviceMesh.from_sizes(dp_size=2, ep_size=2, device_type="cpu"), trust_remote_code=True)
    divided = trainer.export_weights()
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("sgd", lr=0.1)
    trainer.forward_backward(rows, 2)
    trainer.clip_grad_and_step()
    trainer.save(folder / "saved")
    trained = trainer.export_weights()
    tokens = trainer.calculate_metric()
    trainer.load(path)
    back = trainer.export_weights()
    trainer.load(folder / "saved")
    again = trainer.export_weights()
    trainer.close()
    return {"start": start, "divided": divided, "trained": trained, "back": back, "again": again, "metrics": tokens}


@pytest.mark.timeout(300)
def test_a_module_list_in_code_of_the_checkpoint_is_trained_saved_and_loaded(
    two_ranks: Any, checkpoint: Any, features: list[Any], tmp_path: Path
) -> None:
    found = two_ranks.run(listed_on_rank, checkpoint("listed_moe"), features[:4], tmp_path, timeout_s=120)[0]
    name = "model.layers.1.mlp.experts.3.up_proj.bias"
    assert name in found["start"]
    for one, other in (("start", "divided"), ("start", "back"), ("trained", "again")):
        assert found[one].keys() == found[other].keys()
        assert all(np.array_equal(found[one][key], found[other][key]) for key in found[one]), (one, other)
    assert not np.array_equal(found["start"][name], found["trained"][name])
    assert found["metrics"]["moe_load_max"] >= 1


def beside_transformers_on_rank(path: Path, tokens: Any) -> dict[str, float]:
    """Runs on two ranks with the same tokens: ours beside transformers' own expert parallelism, which needs tensor parallel ranks."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, ep_size=2)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config)
    ours: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    apply_expert_parallel(ours, dist.group.WORLD)
    ids = torch.as_tensor(tokens)[None]
    logits = [model(ids, use_cache=False).logits for model in (ours, theirs)]
    for each in logits:
        each.log_softmax(-1)[..., 7].sum().backward()
    found = {"logits": _gap(logits[0], logits[1])}
    for name in ("gate_up_proj", "down_proj"):
        gradients: list[torch.Tensor] = []
        for model in (ours, theirs):
            gradient = model.get_parameter(f"model.layers.1.mlp.experts.{name}").grad
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        # Each rank has sent the same tokens to our experts; theirs get them once.
        found[name] = _gap(gradients[0] / 2, gradients[1])
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_those_of_transformers_own_expert_parallelism(family: str, two_ranks: Any, checkpoint: Any, features: list[Any]) -> None:
    for found in two_ranks.run(beside_transformers_on_rank, checkpoint(family, vocab_size=302), features[4].input_ids, timeout_s=120):
        print(family, found)
        # A few roundings, relative to the largest entry.
        assert max(found.values()) < 5e-6, found
