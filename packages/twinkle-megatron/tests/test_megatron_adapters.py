"""Adapters side by side: apart from one another and the base, from peft's format and back, over checkpoints, and what is refused."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_ADAM = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
_LORA = {"r": 4, "lora_alpha": 8}


@contextlib.contextmanager
def _trainer(path: Path, sizes: dict[str, Any], adapters: Sequence[str] = (), lora: Any = _LORA, **options: Any) -> Iterator[Any]:
    from twinkle_megatron._trainer import MegatronTrainer
    from twinkle_mesh import DeviceMesh

    trainer = MegatronTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes), **options)
    try:
        trainer.set_loss("cross_entropy")
        for name in adapters:
            trainer.add_adapter_to_model(name, lora)
            trainer.set_loss("cross_entropy", adapter_name=name)
        yield trainer
    finally:
        trainer.close()


def _steps(trainer: Any, rows: list[Any], name: str, number: int = 1) -> list[tuple[float, float]]:
    """Loss and gradient norm of so many steps, each on rows of its own."""
    share = trainer._mesh.get_slice(len(rows), int(os.environ["RANK"]))
    done: list[tuple[float, float]] = []
    for _ in range(number):
        begin = trainer.get_train_configs()["adapters"][name]["step"] % len(rows)
        loss = trainer.forward_backward((rows[begin:] + rows[:begin])[share], 2, adapter_name=name).loss
        done.append((loss, trainer.clip_grad_and_step(1.0, adapter_name=name)))
    return done


def _same(mine: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def apart_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    """The base and two adapters, trained in turn, make bit for bit the steps that each makes when it is trained alone."""
    names = ["", "a", "ab"]
    alone: dict[str, tuple[Any, Any]] = {}
    for name in names:
        with _trainer(path, sizes, [name] if name else [], **options) as trainer:
            trainer.set_optimizer("adamw", **_ADAM, adapter_name=name)
            if name:
                outputs = [trainer.forward_only(rows[:2], adapter_name=each).logprobs for each in ("", name)]
                assert outputs[0] is None or _same(dict(enumerate(outputs[0])), dict(enumerate(outputs[1]))), "it begins with an update of zero"
            alone[name] = _steps(trainer, rows, name, 2), trainer.export_weights(adapter_name=name)
    with _trainer(path, sizes, names[1:], **options) as trainer:
        for name in names[1:]:
            trainer.set_optimizer("adamw", **_ADAM, adapter_name=name)
        base = trainer.export_weights()
        done: dict[str, list[Any]] = {"a": [], "ab": []}
        for _ in range(2):
            for name in names[1:]:
                done[name] += _steps(trainer, rows, name)
        for name in names[1:]:
            assert done[name] == alone[name][0]
            assert _same(trainer.export_weights(adapter_name=name), alone[name][1])
        assert done["a"] != done["ab"], "they begin with other matrices"
        assert _same(trainer.export_weights(), base)
        # And the base among adapters is the base alone.
        trainer.set_optimizer("adamw", **_ADAM)
        steps: list[Any] = []
        for _ in range(2):
            steps += _steps(trainer, rows, "")
            _steps(trainer, rows, "a")
        assert steps == alone[""][0]
        assert _same(trainer.export_weights(), alone[""][1])
        assert _same(trainer.export_weights(adapter_name="ab"), alone["ab"][1])


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


def three_calls_on_rank(path: Path, rows: list[Any]) -> None:
    """forward, calculate_loss, backward of one adapter, with the base and another adapter run in between: the same gradients."""
    with _trainer(path, {"world_size": 1}, ["a", "b"], recompute="full") as trainer:
        for name in ("", "a", "b"):
            trainer.set_optimizer("sgd", lr=0.1, adapter_name=name)
        _steps(trainer, rows, "a")
        trainer.forward_backward(rows, adapter_name="a")
        want = trainer.export_gradients(adapter_name="a")
        trainer.zero_grad(adapter_name="a")
        trainer.forward(rows, adapter_name="a")
        trainer.forward(rows)
        trainer.forward_only(rows, adapter_name="b")
        trainer.calculate_loss(adapter_name="a")
        trainer.backward(adapter_name="a")
        have = trainer.export_gradients(adapter_name="a")
        assert max(float(np.abs(have[name] - want[name]).max()) for name in want) < 1e-6
        assert max(float(np.abs(gradient).max()) for gradient in want.values()) > 1e-3
        trainer.calculate_loss()
        trainer.backward()
        assert not any(gradient.any() for name, gradient in trainer.export_gradients().items() if "lora" in name)
        assert trainer.clip_grad_norm() > 1e-3


def test_calls_of_one_adapter_may_be_interrupted_by_others(pools: Any, checkpoint: Any, features: Any) -> None:
    pools(1).run(three_calls_on_rank, checkpoint("qwen3"), features)


def begin_on_rank(path: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    with _trainer(path, sizes, ["a"]) as trainer:
        return trainer.export_weights(adapter_name="a")


def test_an_adapter_begins_alike_in_every_layout(pools: Any, checkpoint: Any) -> None:
    path = checkpoint("qwen3_moe")
    (one,) = pools(1).run(begin_on_rank, path, {"world_size": 1})
    two = pools(2).run(begin_on_rank, path, {"tp_size": 2, "sequence_parallel": True})[0]
    assert _same(one, two)
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
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
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
        assert (without is None) == (logprobs is None)
        assert logprobs is None or _same(dict(enumerate(without)), dict(enumerate(logprobs)))
        trainer.add_adapter_to_model("a", _LORA)
        again = trainer.get_state_dict(adapter_name="a")
        assert all(again[name].equal(before[name]) for name in again)


def test_an_adapter_is_a_source_of_weights(pools: Any, checkpoint: Any, features: Any) -> None:
    pools(2).run(sent_on_rank, checkpoint("llama"), {"pp_size": 2}, features)


def saved_on_rank(path: Path, sizes: dict[str, Any], rows: list[Any], folder: Path, lora: Any) -> list[Any]:
    """An adapter after three steps, saved alone and merged; its log-probabilities."""
    with _trainer(path, sizes, ["a"], lora) as trainer:
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
        _steps(trainer, rows, "a", 3)
        trainer.save(folder / "adapter", adapter_name="a")
        trainer.save(folder / "merged", adapter_name="a", merge=True)
        return trainer.forward_only(rows, adapter_name="a").logprobs


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {"tp_size": 2}), ("qwen3_moe", {"ep_size": 2, "world_size": 2})])
def test_peft_reads_what_is_saved(family: str, sizes: Any, pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = checkpoint(family)
    # Not all of the fused parts; and on experts, those that transformers fuses.
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj", "up_proj"]}
    rows = features if "ep_size" not in sizes else features[:6]
    results = pools(2).run(saved_on_rank, path, sizes, rows, tmp_path, lora)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    farthest = 0.0
    for row, have in zip(rows, results[0], strict=True):
        ids = torch.as_tensor(row.input_ids)[None]

        def logprobs(model: Any, ids: Any = ids, temperature: float = row.temperature) -> Any:
            with torch.no_grad():
                return (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()

        np.testing.assert_allclose(logprobs(adapted), have[1:], rtol=0, atol=3e-5)
        np.testing.assert_allclose(logprobs(merged), have[1:], rtol=0, atol=3e-5)
        farthest = max(farthest, float(np.abs(logprobs(plain) - have[1:]).max()))
    assert farthest > 0.05, "the adapter does nothing: this proves nothing"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(lora["target_modules"])
    assert config["base_model_name_or_path"] == str(path)


def save_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path) -> tuple[Any, Any]:
    """Two steps of an adapter, a checkpoint of it, two steps; another adapter beside it."""
    with _trainer(path, adapters=["a", "b"], **layout) as trainer:
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
        trainer.set_lr_scheduler("cosine", warmup_steps=2, total_steps=10, adapter_name="a")
        _steps(trainer, rows, "a", 2)
        trainer.save_checkpoint(target / "own", user_state={"rows": 2}, adapter_name="a")
        trainer.save_checkpoint(target / "all", user_state={"rows": 3}, background=True)
        done = _steps(trainer, rows, "a", 2)
        trainer.wait_for_checkpoint()
        return done, trainer.export_weights(adapter_name="a")


def resume_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path, forget: bool = False) -> tuple[Any, Any]:
    """The two steps that follow the checkpoint. forget: with moments of zero, for a control."""
    with _trainer(path, adapters=["a", "b"], **layout) as trainer:
        trainer.set_optimizer("sgd" if not layout.get("use_distributed_optimizer") else "adamw", lr=0.1, adapter_name="b")
        _steps(trainer, rows, "b")
        other = trainer.export_weights(adapter_name="b")
        assert trainer.resume_from_checkpoint(target / "own", adapter_name="a") == {"rows": 2}
        if forget:
            for placement in trainer._engine.adapter("a").placements():
                for name, flat, _ in trainer._engine.trainable("a").optimizer.states(placement.tensor):
                    if name.startswith("exp_avg"):
                        flat.zero_()
        result = _steps(trainer, rows, "a", 2), trainer.export_weights(adapter_name="a")
        assert _same(trainer.export_weights(adapter_name="b"), other)
        if not forget:
            assert trainer.resume_from_checkpoint(target / "all") == {"rows": 3}
            again = _steps(trainer, rows, "a", 2)
            assert again == result[0]
            restored = trainer.export_weights(adapter_name="b")
            assert os.environ["RANK"] != "0" or not _same(restored, other)
            # And under another name than it was saved under.
            assert trainer.resume_from_checkpoint(target / "own", adapter_name="b", saved_as="a") == {"rows": 2}
            assert _steps(trainer, rows, "b", 2) == result[0]
        return result


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

    want, weights = run(save_on_rank, writes)
    have, again = run(resume_on_rank, reads)
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(again[name], weight, rtol=0, atol=1e-5, err_msg=name)
    forgotten, _ = run(resume_on_rank, reads, forget=True)
    assert abs(forgotten[1][0] - want[1][0]) > 1e-3, "steps without the moments were the same: these rows prove nothing"
    if writes["sizes"] != reads["sizes"]:
        same, _ = run(resume_on_rank, writes)
        assert same == want, "in the same layout bit for bit"


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
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
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
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
        losses = _steps(trainer, rows, "a", 3)
        assert losses[-1][0] != losses[0][0]
        trainer.save(folder / "small", adapter_name="a")
        before = trainer.export_weights(adapter_name="a")
        trainer.load(folder / "small", adapter_name="a")
        assert _same(trainer.export_weights(adapter_name="a"), before)
        assert len(before) == (2 if os.environ["RANK"] == "0" else 0)
        for name, lora, message in (
            ("r", {"r": 4, "target_modules": ["layers.1.self_attn.q_proj"]}, "with r=2, and this one has 4"),
            ("scaling", {"r": 2, "lora_alpha": 1, "target_modules": ["q_proj"]}, "with lora_alpha=8"),
            ("missing", {"r": 2, "target_modules": ["q_proj"]}, "lacks 2 matrices of the adapter 'missing': .*layers.0.self_attn.q_proj.lora_A"),
            ("left", {"r": 2, "target_modules": ["k_proj"]}, "lacks"),
        ):
            trainer.add_adapter_to_model(name, lora)
            with pytest.raises(CheckpointError, match=message):
                trainer.load(folder / "small", adapter_name=name)
        with pytest.raises(CheckpointError, match="no adapter in peft's format"):
            trainer.load(folder, adapter_name="a")
        if os.environ["RANK"] == "0":
            shutil.copytree(folder / "small", folder / "dora")
            content = json.loads((folder / "dora" / "adapter_config.json").read_text())
            (folder / "dora" / "adapter_config.json").write_text(json.dumps(content | {"use_dora": True}))
        __import__("torch").distributed.barrier()
        with pytest.raises(CheckpointError, match="use_dora=True"):
            trainer.load(folder / "dora", adapter_name="a")


def test_what_an_adapter_cannot_be_is_refused(pools: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    pools(2).run(refused_on_rank, checkpoint("qwen3_moe"), checkpoint("qwen3"), tmp_path, features)
