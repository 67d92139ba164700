"""Adapters side by side: apart from one another and the base, from peft's format and back, over checkpoints, and what is refused."""

import contextlib
import json
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

_LORA = {"r": 4, "lora_alpha": 8}


@contextlib.contextmanager
def _trainer(path: Path, sizes: dict[str, Any], names: Sequence[str] = (), lora: Any = _LORA, **options: Any) -> Iterator[Any]:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    with adapters_on(MegatronTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes), **options), names, lora) as trainer:
        yield trainer


def _share(rows: list[Any], sizes: dict[str, Any]) -> slice:
    from twinkle_mesh import DeviceMesh

    return DeviceMesh.from_sizes(device_type="cpu", **sizes).get_slice(len(rows), int(os.environ["RANK"]))


def _steps(trainer: Any, rows: list[Any], name: str, number: int = 1) -> list[tuple[float, float]]:
    return take_steps(trainer, rows, trainer._mesh.get_slice(len(rows), int(os.environ["RANK"])), name, number)


def apart_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    check_apart(lambda names: _trainer(path, sizes, names, **options), rows, _share(rows, sizes), ("a", "ab"))


def test_the_base_and_adapters_that_take_turns_do_not_touch_one_another(pools: Any, checkpoint: Any, features: Any) -> None:
    pools(1).run(apart_on_rank, checkpoint("qwen3"), features, {"world_size": 1}, {})


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_size": 2}, {"use_distributed_optimizer": True, "overlap_communication": True}),
        ({"pp_size": 2, "vpp_size": 2}, {"layers_per_stage": (1, 1, 1, 1), "recompute": "full"}),
        ({"tp_size": 2, "sequence_parallel": True}, {"mixed_precision": "bf16"}),
    ],
)
def test_they_do_not_in_other_layouts(pools: Any, checkpoint: Any, features: Any, sizes: Any, options: Any) -> None:
    pools(2).run(apart_on_rank, checkpoint("qwen3", num_hidden_layers=4), features, sizes, options, timeout_s=200)


def interrupted_on_rank(path: Path, rows: list[Any]) -> None:
    check_interrupted(lambda names: _trainer(path, {"world_size": 1}, names, recompute="full"), rows, slice(None))


def test_calls_of_one_adapter_may_be_interrupted_by_others(pools: Any, checkpoint: Any, features: Any) -> None:
    pools(1).run(interrupted_on_rank, checkpoint("qwen3"), features)


def begin_on_rank(path: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    with _trainer(path, sizes, ["a"]) as trainer:
        return trainer.export_weights(adapter_name="a")


def test_an_adapter_begins_alike_in_every_layout(pools: Any, checkpoint: Any) -> None:
    path = checkpoint("qwen3_moe")
    (one,) = pools(1).run(begin_on_rank, path, {"world_size": 1})
    two = pools(2).run(begin_on_rank, path, {"tp_size": 2, "sequence_parallel": True})[0]
    assert same(one, two)
    for name, matrix in one.items():
        bound = matrix.shape[1] ** -0.5
        assert not matrix.any() if "lora_B" in name else 0.5 * bound < np.abs(matrix).max() <= bound, name


def sent_on_rank(path: Path, sizes: dict[str, Any], rows: list[Any]) -> None:
    """What a source of an adapter says is what is trained, whole on every rank, and follows a step."""
    from twinkle_megatron import AdapterSource
    from twinkle_sync import Ledger, WeightSource, pack
    from twinkle_train import UnknownAdapterError

    with _trainer(path, sizes, ["a"]) as trainer:
        source = AdapterSource(trainer, "a")
        assert isinstance(source, WeightSource)
        assert source.config["r"] == 4
        assert source.config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        before = {name: tensor.clone() for name, tensor in source.iter_weights()}
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        _steps(trainer, rows, "a")
        after = dict(source.iter_weights())
        state = trainer.get_state_dict(adapter_name="a")
        assert before.keys() == after.keys()
        assert any(not before[name].equal(after[name]) for name in after)
        assert all(state[name].equal(after[name]) for name in state)
        assert list(pack(source.iter_weights(), 1 << 16, Ledger()))
        with pytest.raises(UnknownAdapterError):
            AdapterSource(trainer, "other")
        # A removed adapter is gone, and its name begins anew.
        logprobs = trainer.forward_only(rows).logprobs
        trainer.remove_adapter("a")
        with pytest.raises(UnknownAdapterError):
            trainer.forward_only(rows, adapter_name="a")
        without = trainer.forward_only(rows).logprobs  # on every rank: the stages run together
        assert same(without, logprobs)
        trainer.add_adapter_to_model("a", _LORA)
        again = trainer.get_state_dict(adapter_name="a")
        assert all(again[name].equal(before[name]) for name in again)


def test_an_adapter_is_a_source_of_weights(pools: Any, checkpoint: Any, features: Any) -> None:
    pools(2).run(sent_on_rank, checkpoint("llama"), {"pp_size": 2}, features)


def saved_on_rank(path: Path, sizes: dict[str, Any], rows: list[Any], folder: Path, lora: Any) -> tuple[list[Any], dict[str, Any]]:
    """An adapter after three steps, saved alone and merged; its log-probabilities, and the weights that are sent with it in them."""
    with _trainer(path, sizes, ["a"], lora) as trainer:
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        _steps(trainer, rows, "a", 3)
        trainer.save(folder / "adapter", adapter_name="a")
        trainer.save(folder / "merged", adapter_name="a", merge=True)
        return trainer.forward_only(rows, adapter_name="a").logprobs, {name: tensor.numpy().copy() for name, tensor in trainer.iter_merged("a")}


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {"tp_size": 2}), ("qwen3_moe", {"ep_size": 2, "world_size": 2})])
def test_peft_reads_what_is_saved(family: str, sizes: Any, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    path = checkpoint(family)
    # Not all of the fused parts; and on experts, those that transformers fuses.
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "up_proj"]}
    rows = features if "ep_size" not in sizes else features[:6]
    results = pools(2).run(saved_on_rank, path, sizes, rows, tmp_path, lora)
    logprobs, merged = results[0]
    check_peft_reads(path, tmp_path, rows, logprobs, lora["target_modules"])
    check_merged(path, tmp_path / "adapter", merged)


def _make(path: Path, layout: dict[str, Any]) -> Any:
    return lambda names: _trainer(path, names=names, **layout)


def save_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path) -> Any:
    return save_states(_make(path, layout), rows, _share(rows, layout["sizes"]), target)


def resume_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path, forget: bool = False) -> Any:
    def forget_moments(trainer: Any) -> None:
        for placement in trainer._engine.adapter("a").placements():
            for name, flat, _ in trainer._engine.trainable("a").optimizer.states(placement.tensor):
                if name.startswith("exp_avg"):
                    flat.zero_()

    other = "adamw" if layout.get("use_distributed_optimizer") else "sgd"
    share = _share(rows, layout["sizes"])
    return resume_states(_make(path, layout), rows, share, target, forget_moments if forget else None, other)


# The model, the layout that writes, the layout that reads.
RESHARDED: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "tp2 sp to one": (("qwen3", {}), {"sizes": {"tp_size": 2, "sequence_parallel": True}}, {"sizes": {"world_size": 1}}),
}
RESHARDED_TOO: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "ep2 distributed optimizer to tp2 sp": (
        ("qwen3_moe", {}),
        {"sizes": {"ep_size": 2, "world_size": 2}, "use_distributed_optimizer": True},
        {"sizes": {"tp_size": 2, "sequence_parallel": True}},
    ),
    "one to pp2 dp2 distributed optimizer": (
        ("llama", {}),
        {"sizes": {"world_size": 1}},
        {"sizes": {"pp_size": 2, "dp_size": 2}, "use_distributed_optimizer": True},
    ),
    "etp2 ep2 to ep2": (
        ("deepseek_v3", {}),
        {"sizes": {"dp_size": 2, "tp_size": 2, "etp_size": 2, "ep_size": 2, "world_size": 4, "sequence_parallel": True}},
        {"sizes": {"ep_size": 2, "world_size": 2}},
    ),
}


def _reshard(row: Any, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    from twinkle_mesh import DeviceMesh

    (family, model_sizes), writes, reads = row
    path = checkpoint(family, **model_sizes)

    def run(function: Any, layout: dict[str, Any], **options: Any) -> Any:
        world_size = DeviceMesh.from_sizes(device_type="cpu", **layout["sizes"]).world_size
        return pools(world_size).run(function, path, layout, features, tmp_path, timeout_s=300, **options)[0]

    written, resumed, forgotten = run(save_on_rank, writes), run(resume_on_rank, reads), run(resume_on_rank, reads, forget=True)
    check_resumed(written, resumed, forgotten, run(resume_on_rank, writes) if writes["sizes"] != reads["sizes"] else None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESHARDED)
def test_training_of_an_adapter_goes_on_in_another_layout(name: str, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    _reshard(RESHARDED[name], pools, checkpoint, features, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESHARDED_TOO)
def test_training_of_an_adapter_goes_on_in_another_layout_of_all(name: str, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    _reshard(RESHARDED_TOO[name], pools, checkpoint, features, tmp_path)


def dropout_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses with dropout, without, and the matrices that all ranks have copies of."""
    with _trainer(path, sizes, ["a"], _LORA | {"lora_dropout": 0.3}) as trainer:
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        _steps(trainer, rows, "a", 2)
        losses = [trainer.forward_backward(rows, 2, adapter_name="a").loss for _ in range(2)]
        plain = [float(np.concatenate(trainer.forward_only(rows, adapter_name="a").logprobs).sum()) for _ in range(2)]
        assert plain[0] == plain[1]
        assert losses[0] != losses[1]
        chunks = trainer._engine.adapter("a")._chunks
        copies = [p for chunk in chunks for p in chunk.parameters() if not getattr(p, "tensor_model_parallel", False)]
        return losses, [p.detach().numpy() for p in copies]


def test_dropout_drops_the_same_numbers_where_ranks_have_the_same_tokens(pools: Any, checkpoint: Any, features: Any) -> None:
    one, two = pools(2).run(dropout_on_rank, checkpoint("qwen3"), features, {"tp_size": 2})
    assert one[0] == two[0]
    assert len(one[1]) == len(two[1]) > 0
    for mine, other in zip(one[1], two[1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-7)


def refused_on_rank(path: Path, dense: Path, folder: Path, rows: list[Any]) -> None:
    import shutil

    from twinkle_megatron import CheckpointError
    from twinkle_train import ConfigError

    tp = {"tp_size": 2, "sequence_parallel": True}
    with _trainer(path, tp) as trainer:
        for lora, message in (
            (
                {"target_modules": ["q_proj", "lm_head"]},
                "'lm_head' is no linear layer .* these are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj",
            ),
            ({"target_modules": ["experts.1.up_proj"]}, "1 of the 4 experts of model.layers.0.mlp: an adapter is on all"),
            ({"r": 3}, "r=3 does not divide over etp_size=2"),
        ):
            with pytest.raises(ConfigError, match=message):
                trainer.add_adapter_to_model("a", lora)
            assert "a" not in trainer.get_train_configs()["adapters"]
        trainer.add_adapter_to_model("a", {"r": 3, "target_modules": ["q_proj"]})
    # One stage has no part of this adapter, and trains along all the same.
    with _trainer(dense, {"pp_size": 2}, ["a"], {"r": 2, "target_modules": ["layers.1.self_attn.q_proj"]}) as trainer:
        trainer.set_optimizer("adamw", **ADAM, adapter_name="a")
        losses = _steps(trainer, rows, "a", 3)
        assert losses[-1][0] != losses[0][0]
        trainer.save(folder / "small", adapter_name="a")
        before = trainer.export_weights(adapter_name="a")
        trainer.load(folder / "small", adapter_name="a")
        assert same(trainer.export_weights(adapter_name="a"), before)
        assert len(before) == (2 if os.environ["RANK"] == "0" else 0)
        check_refused_files(trainer, folder / "small", "layers.1.self_attn.q_proj", "k_proj", CheckpointError)
        if os.environ["RANK"] == "0":
            shutil.copytree(folder / "small", folder / "dora")
            content = json.loads((folder / "dora" / "adapter_config.json").read_text())
            (folder / "dora" / "adapter_config.json").write_text(json.dumps(content | {"use_dora": True}))
        __import__("torch").distributed.barrier()
        with pytest.raises(CheckpointError, match="use_dora=True"):
            trainer.load(folder / "dora", adapter_name="a")


def test_what_an_adapter_cannot_be_is_refused(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(2).run(refused_on_rank, checkpoint("qwen3_moe"), checkpoint("qwen3"), tmp_path, features)
