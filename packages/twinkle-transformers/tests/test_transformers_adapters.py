"""Adapters side by side: apart from one another and the base, from peft's format and back, over checkpoints, removed, and what is refused."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_train.testing.adapters import (
    ADAM,
    adapters_on,
    check_apart,
    check_interrupted,
    check_merged,
    check_peft_reads,
    check_refused_files,
    check_resumed,
    resume_states,
    same,
    save_states,
    take_steps,
)

# The first test starts the ranks.
pytestmark = pytest.mark.timeout(300)

_LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}


@contextlib.contextmanager
def _trainer(path: Path, sizes: dict[str, Any], names: Sequence[str] = (), lora: Any = _LORA, **options: Any) -> Iterator[Any]:
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    with adapters_on(TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes), **options), names, lora) as trainer:
        yield trainer


def _share(rows: list[Any], sizes: dict[str, Any]) -> slice:
    from twinkle_mesh import DeviceMesh

    return DeviceMesh.from_sizes(device_type="cpu", **sizes).get_slice(len(rows), int(os.environ["RANK"]))


def apart_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    check_apart(lambda names: _trainer(path, sizes, names, **options), rows, _share(rows, sizes), ("a.b", "a"))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"fsdp_size": 2}, {"mixed_precision": "bf16"}),
        pytest.param({"dp_size": 2}, {"activation_checkpointing": True}, marks=pytest.mark.full),
        pytest.param({"ulysses_size": 2}, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_base_and_adapters_that_take_turns_do_not_touch_one_another(
    two_ranks: Any, checkpoint: Any, features: Any, sizes: Any, options: Any
) -> None:
    two_ranks.run(apart_on_rank, checkpoint("qwen3"), features, sizes, options)


def interrupted_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    check_interrupted(lambda names: _trainer(path, sizes, names, **options), rows, _share(rows, sizes))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"fsdp_size": 2}, {"activation_checkpointing": True}),
        pytest.param({"dp_size": 2}, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_calls_of_one_adapter_may_be_interrupted_by_others(two_ranks: Any, checkpoint: Any, features: Any, sizes: Any, options: Any) -> None:
    two_ranks.run(interrupted_on_rank, checkpoint("qwen3"), features, sizes, options)


def saved_on_rank(path: Path, sizes: dict[str, Any], rows: list[Any], folder: Path, lora: Any) -> dict[str, Any]:
    """An adapter after three steps, saved alone and merged, read again, sent, and removed; its log-probabilities."""
    from twinkle_sync import WeightSource
    from twinkle_train import UnknownAdapterError
    from twinkle_transformers import AdapterSource

    with _trainer(path, sizes, ["a", "b"], lora) as trainer:
        start = trainer.export_weights(adapter_name="a")
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        take_steps(trainer, rows, _share(rows, sizes), "a", 3)
        trainer.save(folder / "adapter", adapter_name="a")
        trainer.save(folder / "merged", adapter_name="a", merge=True)
        merged = {name: tensor.float().numpy().copy() for name, tensor in trainer.iter_merged("a")}
        assert list(merged) == [name for name, _ in trainer.iter_weights()]
        logprobs = trainer.forward_only(rows, adapter_name="a").logprobs
        source = AdapterSource(trainer, "a")
        assert isinstance(source, WeightSource)
        state = trainer.get_state_dict(adapter_name="a")
        for name, tensor in source.iter_weights():
            assert os.environ["RANK"] != "0" or tensor.equal(state[name])
        trainer.load(folder / "adapter", adapter_name="b")
        assert same(trainer.export_weights(adapter_name="b"), trainer.export_weights(adapter_name="a"))
        trainer.remove_adapter("a")
        for call in (lambda: trainer.forward_only(rows, adapter_name="a"), lambda: source.iter_weights(), lambda: trainer.remove_adapter("a")):
            with pytest.raises(UnknownAdapterError):
                call()
        assert same(trainer.forward_only(rows, adapter_name="b").logprobs, logprobs)
        # The name begins anew; another rank is another adapter.
        trainer.add_adapter_to_model("a", lora)
        assert trainer.get_train_configs()["adapters"]["a"]["step"] == 0
        assert same(trainer.export_weights(adapter_name="a"), start)
        trainer.remove_adapter("a")
        trainer.add_adapter_to_model("a", lora | {"r": 2})
        trainer.save_checkpoint(folder / "small", adapter_name="a")
        trainer.resume_from_checkpoint(folder / "small", adapter_name="a")
        return {"logprobs": logprobs, "start": start, "merged": merged}


@pytest.mark.parametrize(
    ("family", "sizes", "more"),
    [
        ("qwen3", {"fsdp_size": 2}, []),
        pytest.param("qwen3_moe", {"dp_size": 2, "ep_size": 2}, ["down_proj", "gate_proj", "up_proj"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_peft_reads_what_is_saved(family: str, sizes: Any, more: list[str], two_ranks: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    path = checkpoint(family)
    targets = [*_LORA["target_modules"], *more]
    results = two_ranks.run(saved_on_rank, path, sizes, features, tmp_path, _LORA | {"target_modules": targets})
    check_peft_reads(path, tmp_path, features, results[0]["logprobs"], targets)
    if not more:  # peft has experts fused, checkpoints have them one by one: the merged model was compared above
        check_merged(path, tmp_path / "adapter", results[0]["merged"])
    for name, matrix in results[0]["start"].items():
        bound = matrix.shape[1] ** -0.5
        assert not matrix.any() if "lora_B" in name else 0.5 * bound < np.abs(matrix).max() <= bound, name


def test_merged_weights_of_one_rank_are_those_of_peft(checkpoint: Any, features: Any, tmp_path: Path) -> None:
    from twinkle_transformers import TransformersModel

    path = checkpoint("qwen3")
    model: Any = TransformersModel(path)
    model.add_adapter_to_model("a", _LORA)
    model.set_loss("cross_entropy", adapter_name="a")
    model.set_optimizer("adamw", **ADAM, adapter_name="a")
    model.forward_backward(features, adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    model.save(tmp_path / "adapter", adapter_name="a")
    merged = {name: tensor.numpy().copy() for name, tensor in model.iter_merged("a")}
    model.close()
    check_merged(path, tmp_path / "adapter", merged)


def save_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path) -> Any:
    return save_states(functools.partial(_trainer, path, layout["sizes"]), rows, _share(rows, layout["sizes"]), target)


def resume_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path, forget: bool = False) -> Any:
    def forget_moments(trainer: Any) -> None:
        for piece in trainer._optimizers["a"].pieces():
            piece.tensor.zero_()

    make = functools.partial(_trainer, path, layout["sizes"])
    return resume_states(make, rows, _share(rows, layout["sizes"]), target, forget_moments if forget else None)


# The model, ranks and layout that write, and that read.
RESHARDED: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "fsdp2 to ulysses2": ("qwen3", (2, {"sizes": {"fsdp_size": 2}}), (2, {"sizes": {"ulysses_size": 2}})),
    "ep2 to one": ("qwen3_moe", (2, {"sizes": {"dp_size": 2, "ep_size": 2}}), (1, {"sizes": {}})),
    "one to dp2 fsdp2": ("llama", (1, {"sizes": {}}), (4, {"sizes": {"dp_size": 2, "fsdp_size": 2}})),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "fsdp2 to ulysses2" else (pytest.mark.full,)) for n in RESHARDED])
def test_training_of_an_adapter_goes_on_in_another_layout(name: str, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    family, (writers, writes), (readers, reads) = RESHARDED[name]
    path = checkpoint(family)
    written = pools(writers).run(save_on_rank, path, writes, features, tmp_path)[0]
    resumed, forgotten = (pools(readers).run(resume_on_rank, path, reads, features, tmp_path, forget=forget)[0] for forget in (False, True))
    check_resumed(written, resumed, forgotten, pools(writers).run(resume_on_rank, path, writes, features, tmp_path)[0])


def test_dropout_is_of_training_only(checkpoint: Any, features: Any) -> None:
    from twinkle_transformers import TransformersModel

    model: Any = TransformersModel(checkpoint("qwen3"))
    model.add_adapter_to_model("a", _LORA | {"lora_dropout": 0.5})
    model.set_loss("cross_entropy", adapter_name="a")
    model.set_optimizer("adamw", **ADAM, adapter_name="a")
    model.forward_backward(features, adapter_name="a")
    model.clip_grad_and_step(adapter_name="a")
    losses = [model.forward_backward(features, adapter_name="a").loss for _ in range(2)]
    assert losses[0] != losses[1]
    one, other = (np.concatenate(model.forward_only(features, adapter_name="a").get().logprobs) for _ in range(2))
    assert np.array_equal(one, other)
    model.close()


def test_what_an_adapter_cannot_be_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    from twinkle_train import ConfigError
    from twinkle_transformers import CheckpointError, TransformersModel

    model: Any = TransformersModel(checkpoint("qwen3"))
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ConfigError, match=f"'lm_head' is no linear layer .* these are {known}"):
        model.add_adapter_to_model("a", {"target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(ConfigError, match="cannot be removed"):
        model.remove_adapter("")
    model.add_adapter_to_model("a", {"r": 2, "target_modules": ["layers.1.self_attn.q_proj"]})
    assert len(model.export_weights(adapter_name="a")) == 2
    model.save(tmp_path / "small", adapter_name="a")
    check_refused_files(model, tmp_path / "small", "layers.1.self_attn.q_proj", "k_proj", CheckpointError)
    model.close()
    experts = TransformersModel(checkpoint("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"some experts of a layer, but not model.layers.0.mlp.experts.0.up_proj: adapters are on all"):
        experts.add_adapter_to_model("a", {"r": 2, "target_modules": ["q_proj", "experts.1.up_proj"]})
    experts.close()
    fused = TransformersModel(checkpoint("gpt_oss"))
    for modules in ("all-linear", ["q_proj", "down_proj"]):
        with pytest.raises(
            ConfigError, match=r"cannot be on model.layers.0.mlp.experts.\w+: experts of GptOssExperts are not in checkpoints as linear"
        ):
            fused.add_adapter_to_model("a", {"r": 2, "target_modules": modules})
    fused.close()
    conv = TransformersModel(checkpoint("gpt2"))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        conv.add_adapter_to_model("a", {"r": 2})
    conv.close()
