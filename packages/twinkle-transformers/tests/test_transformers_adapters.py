"""Adapters side by side: apart from one another and the base, from peft's format and back, over checkpoints, removed, and what is refused."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The first test starts the ranks.
pytestmark = pytest.mark.timeout(300)

_ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
_LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}


@contextlib.contextmanager
def _trainer(path: Path, sizes: dict[str, Any], adapters: Sequence[str] = (), lora: Any = _LORA, **options: Any) -> Iterator[Any]:
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    trainer = TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes), **options)
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
    names = ["", "a.b", "a"]
    alone: dict[str, tuple[Any, Any]] = {}
    for name in names:
        with _trainer(path, sizes, [name] if name else [], **options) as trainer:
            trainer.set_optimizer("adamw", **_ADAM, adapter_name=name)
            if name:
                outputs = [trainer.forward_only(rows[:2], adapter_name=each).logprobs for each in ("", name)]
                assert _same(dict(enumerate(outputs[0])), dict(enumerate(outputs[1]))), "it begins with an update of zero"
            alone[name] = _steps(trainer, rows, name, 2), trainer.export_weights(adapter_name=name)
    with _trainer(path, sizes, names[1:], **options) as trainer:
        for name in names[1:]:
            trainer.set_optimizer("adamw", **_ADAM, adapter_name=name)
        base = trainer.export_weights()
        done: dict[str, list[Any]] = {name: [] for name in names[1:]}
        for _ in range(2):
            for name in names[1:]:
                done[name] += _steps(trainer, rows, name)
        for name in names[1:]:
            assert done[name] == alone[name][0]
            assert _same(trainer.export_weights(adapter_name=name), alone[name][1])
        assert done["a"] != done["a.b"], "they begin with other matrices"
        assert _same(trainer.export_weights(), base)
        # And the base among adapters is the base alone.
        trainer.set_optimizer("adamw", **_ADAM)
        steps: list[Any] = []
        for _ in range(2):
            steps += _steps(trainer, rows, "")
            _steps(trainer, rows, "a.b")
        assert steps == alone[""][0]
        assert _same(trainer.export_weights(), alone[""][1])
        assert _same(trainer.export_weights(adapter_name="a"), alone["a"][1])


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


def three_calls_on_rank(path: Path, rows: list[Any], sizes: dict[str, Any], options: dict[str, Any]) -> None:
    """forward, calculate_loss, backward of one adapter, with the base and another adapter run in between: the same gradients."""
    with _trainer(path, sizes, ["a", "b"], **options) as trainer:
        for name in ("", "a", "b"):
            trainer.set_optimizer("sgd", lr=0.1, adapter_name=name)
        _steps(trainer, rows, "a")
        want: dict[str, dict[str, Any]] = {}
        for name in ("a", ""):
            trainer.forward_backward(rows, adapter_name=name)
            want[name] = trainer.export_gradients(adapter_name=name)
            trainer.zero_grad(adapter_name=name)
        trainer.forward(rows, adapter_name="a")
        trainer.calculate_loss(adapter_name="a")
        trainer.forward_only(rows)
        trainer.forward(rows)
        trainer.calculate_loss()
        trainer.forward_backward(rows, adapter_name="b")
        trainer.backward(adapter_name="a")
        trainer.backward()
        for name, gradients in want.items():
            have = trainer.export_gradients(adapter_name=name)
            assert have.keys() == gradients.keys()
            for key, gradient in gradients.items():
                np.testing.assert_allclose(have[key], gradient, rtol=0, atol=1e-6, err_msg=f"{name}/{key}")
            assert os.environ["RANK"] != "0" or max(float(np.abs(gradient).max()) for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"fsdp_size": 2}, {"activation_checkpointing": True}),
        pytest.param({"dp_size": 2}, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_calls_of_one_adapter_may_be_interrupted_by_others(two_ranks: Any, checkpoint: Any, features: Any, sizes: Any, options: Any) -> None:
    two_ranks.run(three_calls_on_rank, checkpoint("qwen3"), features, sizes, options)


def saved_on_rank(path: Path, sizes: dict[str, Any], rows: list[Any], folder: Path, lora: Any) -> dict[str, Any]:
    """An adapter after three steps, saved alone and merged, read again, sent, and removed; its log-probabilities."""
    from twinkle_sync import WeightSource
    from twinkle_train import UnknownAdapterError
    from twinkle_transformers import AdapterSource

    with _trainer(path, sizes, ["a", "b"], lora) as trainer:
        start = trainer.export_weights(adapter_name="a")
        trainer.set_optimizer("adamw", **_ADAM, adapter_name="a")
        _steps(trainer, rows, "a", 3)
        trainer.save(folder / "adapter", adapter_name="a")
        trainer.save(folder / "merged", adapter_name="a", merge=True)
        logprobs = trainer.forward_only(rows, adapter_name="a").logprobs
        source = AdapterSource(trainer, "a")
        assert isinstance(source, WeightSource)
        state = trainer.get_state_dict(adapter_name="a")
        for name, tensor in source.iter_weights():
            assert os.environ["RANK"] != "0" or tensor.equal(state[name])
        trainer.load(folder / "adapter", adapter_name="b")
        assert _same(trainer.export_weights(adapter_name="b"), trainer.export_weights(adapter_name="a"))
        trainer.remove_adapter("a")
        for call in (lambda: trainer.forward_only(rows, adapter_name="a"), lambda: source.iter_weights(), lambda: trainer.remove_adapter("a")):
            with pytest.raises(UnknownAdapterError):
                call()
        assert _same(dict(enumerate(trainer.forward_only(rows, adapter_name="b").logprobs)), dict(enumerate(logprobs)))
        # The name begins anew; another rank is another adapter.
        trainer.add_adapter_to_model("a", lora)
        assert trainer.get_train_configs()["adapters"]["a"]["step"] == 0
        assert _same(trainer.export_weights(adapter_name="a"), start)
        trainer.remove_adapter("a")
        trainer.add_adapter_to_model("a", lora | {"r": 2})
        trainer.save_checkpoint(folder / "small", adapter_name="a")
        trainer.resume_from_checkpoint(folder / "small", adapter_name="a")
        return {"logprobs": logprobs, "start": start}


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3", {"fsdp_size": 2}), pytest.param("qwen3_moe", {"dp_size": 2, "ep_size": 2}, marks=pytest.mark.full)], ids=str
)
def test_peft_reads_what_is_saved(family: str, sizes: Any, two_ranks: Any, checkpoint: Any, features: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = checkpoint(family)
    results = two_ranks.run(saved_on_rank, path, sizes, features, tmp_path, _LORA)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    have = results[0]["logprobs"]
    farthest = 0.0
    for row, mine in zip(features, have, strict=True):
        ids = torch.as_tensor(row.input_ids)[None]

        def logprobs(model: Any, ids: Any = ids, temperature: float = row.temperature) -> Any:
            with torch.no_grad():
                return (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()

        np.testing.assert_allclose(logprobs(adapted), mine[1:], rtol=0, atol=3e-5)
        np.testing.assert_allclose(logprobs(merged), mine[1:], rtol=0, atol=3e-5)
        farthest = max(farthest, float(np.abs(logprobs(plain) - mine[1:]).max()))
    assert farthest > 0.05, "the adapter does nothing: this proves nothing"
    for name, matrix in results[0]["start"].items():
        bound = matrix.shape[1] ** -0.5
        assert not matrix.any() if "lora_B" in name else 0.5 * bound < np.abs(matrix).max() <= bound, name
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(_LORA["target_modules"])
    assert config["base_model_name_or_path"] == str(path)


def save_on_rank(path: Path, layout: dict[str, Any], rows: list[Any], target: Path) -> tuple[Any, Any]:
    """Two steps of an adapter, a checkpoint of it and one of all, two steps; another adapter beside it."""
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
        trainer.set_optimizer("sgd", lr=0.1, adapter_name="b")
        _steps(trainer, rows, "b")
        other = trainer.export_weights(adapter_name="b")
        assert trainer.resume_from_checkpoint(target / "own", adapter_name="a") == {"rows": 2}
        if forget:
            for piece in trainer._optimizers["a"].pieces():
                piece.tensor.zero_()
        result = _steps(trainer, rows, "a", 2), trainer.export_weights(adapter_name="a")
        assert _same(trainer.export_weights(adapter_name="b"), other)
        if not forget:
            assert trainer.resume_from_checkpoint(target / "all") == {"rows": 3}
            assert _steps(trainer, rows, "a", 2) == result[0]
            restored = trainer.export_weights(adapter_name="b")
            assert os.environ["RANK"] != "0" or not _same(restored, other)
            # And under another name than it was saved under.
            assert trainer.resume_from_checkpoint(target / "own", adapter_name="b", saved_as="a") == {"rows": 2}
            assert _steps(trainer, rows, "b", 2) == result[0]
        return result


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
    want, weights = pools(writers).run(save_on_rank, path, writes, features, tmp_path)[0]
    have, again = pools(readers).run(resume_on_rank, path, reads, features, tmp_path)[0]
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(again[key], weight, rtol=0, atol=1e-5, err_msg=key)
    forgotten, _ = pools(readers).run(resume_on_rank, path, reads, features, tmp_path, forget=True)[0]
    assert abs(forgotten[1][0] - want[1][0]) > 1e-3, "steps without the moments were the same: these rows prove nothing"
    same, _ = pools(writers).run(resume_on_rank, path, writes, features, tmp_path)[0]
    assert same == want, "in the same layout bit for bit"


def test_dropout_is_of_training_only(checkpoint: Any, features: Any) -> None:
    from twinkle_transformers import TransformersModel

    model: Any = TransformersModel(checkpoint("qwen3"))
    model.add_adapter_to_model("a", _LORA | {"lora_dropout": 0.5})
    model.set_loss("cross_entropy", adapter_name="a")
    model.set_optimizer("adamw", **_ADAM, adapter_name="a")
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
    for name, lora, message in (
        ("r", {"r": 4, "target_modules": ["layers.1.self_attn.q_proj"]}, "with r=2, and this one has 4"),
        ("scaling", {"r": 2, "lora_alpha": 1, "target_modules": ["q_proj"]}, "with lora_alpha=8"),
        ("missing", {"r": 2, "target_modules": ["q_proj"]}, "lacks 2 matrices of the adapter 'missing': .*layers.0.self_attn.q_proj.lora_A"),
        ("left", {"r": 2, "target_modules": ["layers.1.self_attn.k_proj"]}, "lacks"),
    ):
        model.add_adapter_to_model(name, lora)
        with pytest.raises(CheckpointError, match=message):
            model.load(tmp_path / "small", adapter_name=name)
    with pytest.raises(CheckpointError, match="no adapter in peft's format"):
        model.load(tmp_path, adapter_name="a")
    model.close()
    experts = TransformersModel(checkpoint("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"'all-linear' means experts, too, and those of Qwen3MoeExperts are not linear layers here"):
        experts.add_adapter_to_model("a", {"r": 2})
    with pytest.raises(ConfigError, match="'up_proj' is no linear layer"):
        experts.add_adapter_to_model("a", {"r": 2, "target_modules": ["q_proj", "up_proj"]})
    experts.close()
    conv = TransformersModel(checkpoint("gpt2"))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        conv.add_adapter_to_model("a", {"r": 2})
    conv.close()
