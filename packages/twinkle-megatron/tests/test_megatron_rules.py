"""Each special rule of the CPU platform is still needed: its module without it fails as the rule says, and with it does not."""

import importlib.util
import logging
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from twinkle_megatron import cpu


def without(name: str | None) -> types.SimpleNamespace:
    """The names of a rule's module, rewritten as on import but for that rule (None: with all of them)."""
    from twinkle_megatron.cpu import _cuda_standin, _rules

    cpu.enable()
    rule = next(rule for rule in _rules.SPECIAL_RULES if rule.name == (name or "").removeprefix("with "))
    spec = importlib.util.find_spec(rule.module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    for other in _rules.SPECIAL_RULES:
        if other.module == rule.module and (other is not rule or name != rule.name):
            source = source.replace(other.old, other.new)
    for general in _rules.GENERAL_RULES:
        source = general.pattern.sub(general.replacement, source)
    module = types.ModuleType(rule.module)
    module.__dict__.update({"__package__": rule.module.rpartition(".")[0], "__file__": spec.origin, _rules.CUDA: _cuda_standin.build()})
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return SimpleNamespace(**module.__dict__)


def jit_fuser(module: Any) -> None:
    assert module.jit_fuser is not torch.compile, "every fuser would be compiled"


def set_rng_state(module: Any) -> None:
    state = torch.Generator().manual_seed(7).get_state()
    before = torch.get_rng_state()
    try:
        module._set_cuda_rng_state(state)
        assert torch.equal(torch.get_rng_state(), state), "the state was queued for a GPU and not set"
    finally:
        torch.set_rng_state(before)


def rng_fork_check(module: Any) -> None:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addHandler(handler)
    before = torch.get_rng_state()
    try:
        tracker = module.CudaRNGStatesTracker()
        tracker.add("some", 3)
        with tracker.fork("some"):
            torch.rand(2)
    finally:
        torch.set_rng_state(before)
        logger.removeHandler(handler)
    assert not warned, warned


def splits_to_numpy(module: Any) -> None:
    assert not torch.is_tensor(module.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True))


def router_gemm(module: Any) -> None:
    module.RouterGatingLinearFunction.apply(torch.ones(2, 3), torch.ones(4, 3), None, torch.float32)


def optimizer_step_key(module: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    adam.step()
    optimizer = SimpleNamespace(
        model_param_group_index_map={weight: (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        optimizer=adam,
    )
    saved = {"param": torch.ones(2), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    with torch.no_grad():
        module.DistributedOptimizer._set_main_param_and_optimizer_states(optimizer, weight, saved)


NEEDS: dict[str, Callable[[Any], None]] = {
    "jit-fuser": jit_fuser,
    "set-rng-state": set_rng_state,
    "rng-fork-check": rng_fork_check,
    "splits-to-numpy": splits_to_numpy,
    "router-gemm": router_gemm,
    "optimizer-step-key": optimizer_step_key,
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_module_without_the_rule_fails_and_with_it_does_not(name: str) -> None:
    NEEDS[name](without(f"with {name}"))
    with pytest.raises((AssertionError, NameError, KeyError)):
        NEEDS[name](without(name))


def gather_unevenly_on_rank(name: str) -> str:
    """Runs on every rank: what an all-gather of different lengths comes to; "fine" or the error."""
    import torch.distributed as dist

    rank = dist.get_rank()
    try:
        module = without(name)
        out = module._gather_along_first_dim(torch.full((1 + rank,), float(rank)), dist.group.WORLD, [1, 2])
        assert torch.equal(out, torch.tensor([0.0, 1.0, 1.0])), out
    except (RuntimeError, ValueError, NameError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("name", ["uneven-all-gather", "uneven-all-gather-helper"])
def test_gloo_refuses_different_lengths_without_the_rule(name: str, pools: Any) -> None:
    assert pools(2).run(gather_unevenly_on_rank, f"with {name}") == ["fine", "fine"]
    answers = pools(2).run(gather_unevenly_on_rank, name)
    assert "fine" not in answers, answers


def test_every_special_rule_has_a_test_of_its_need() -> None:
    assert {rule.name for rule in cpu.SPECIAL_RULES} == NEEDS.keys() | {"uneven-all-gather", "uneven-all-gather-helper"}
