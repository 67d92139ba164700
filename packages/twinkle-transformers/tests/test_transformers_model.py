"""One process: what is refused, precision, files, and that models do not disturb one another."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinkle_data import InputFeature, InputProcessor, PackedFeature
from twinkle_mesh import DeviceMesh
from twinkle_train import CallOrderError, ConfigError, InputError
from twinkle_train.testing import conformance
from twinkle_transformers import CheckpointError, LayoutError, ModelNotFoundError, SequenceParallelConfig, TransformersModel, UnsupportedModelError


@pytest.fixture
def made() -> Any:
    """Makes models and closes them."""
    models: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        models.append(TransformersModel(*args, **options))
        return models[-1]

    yield make
    for model in models:
        model.close()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is not a folder with a Hugging Face model \(config\.json\)"):
        TransformersModel(tmp_path)


def test_an_axis_that_it_does_not_have_is_refused_with_what_to_use(checkpoint: Any) -> None:
    with pytest.raises(LayoutError, match=r"has no tp axis \(tp_size=2\): use fsdp_size or ulysses_size, or MegatronModel"):
        TransformersModel(checkpoint("qwen3"), device_mesh=DeviceMesh.from_sizes(tp_size=2))


def test_a_mesh_of_more_ranks_than_processes_is_refused(checkpoint: Any) -> None:
    from twinkle_transformers._trainer import TransformersTrainer

    with pytest.raises(LayoutError, match="the mesh has 2 ranks, and 1 processes run"):
        TransformersTrainer(checkpoint("qwen3"), DeviceMesh.from_sizes(dp_size=2))


def test_wrong_options_are_refused(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="mixed_precision is 'no', 'bf16' or 'fp16', not 'fp8'"):
        TransformersModel(checkpoint("qwen3"), mixed_precision="fp8")  # pyright: ignore[reportArgumentType]
    wrong: Any = {"ulysses_size": 2}
    with pytest.raises(ConfigError, match=r"sequence_parallel is SequenceParallelConfig\(\.\.\.\), not \{'ulysses_size': 2\}"):
        TransformersModel(checkpoint("qwen3"), sequence_parallel=wrong)
    with pytest.raises(LayoutError, match="the mesh divides no sequences"):
        TransformersModel(checkpoint("qwen3"), sequence_parallel=SequenceParallelConfig(ulysses_size=2))
    with pytest.raises(UnsupportedModelError, match=r"cannot load .* as a causal language model: FlashAttention2"):
        TransformersModel(checkpoint("qwen3"), attn_implementation="flash_attention_2")
    with pytest.raises(UnsupportedModelError, match="Gemma2Attention caps its attention scores, which 'sdpa' cannot do"):
        TransformersModel(checkpoint("gemma2"), attn_implementation="sdpa")


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = checkpoint("qwen2")
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of Qwen2ForCausalLM, \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        TransformersModel(tmp_path)


def test_a_token_outside_the_vocabulary_is_refused(checkpoint: Any, made: Any) -> None:
    model = made(checkpoint("qwen3"))
    with pytest.raises(InputError, match=r"inputs\[0\]\.input_ids has the token 301, and the model's vocabulary has 301"):
        model.forward([InputFeature(input_ids=[3, 301])])


# Which models let the sequences of a row see one another, and what is said about it.
LEAKS = {
    "olmo_hybrid": r"tokens of one sequence reach the next one of the row in OlmoHybridForCausalLM \(look at OlmoHybridGatedDeltaNet\)",
    "mamba": "MambaForCausalLM.* has attention of its own|MambaForCausalLM.forward has no position_ids",
    "falcon": "FalconForCausalLM has attention of its own, not from transformers' AttentionInterface",
    "bloom": "BloomForCausalLM has attention of its own|BloomForCausalLM.forward has no position_ids",
}


@pytest.mark.parametrize("family", LEAKS)
def test_packed_rows_are_refused_where_they_would_leak(family: str, checkpoint: Any, made: Any, features: list[Any]) -> None:
    model = made(checkpoint(family))
    with pytest.raises(ConfigError, match=f"padding_free rows would be wrong: ({LEAKS[family]})"):
        model.set_processor(InputProcessor(padding_free=True))
    packed = [PackedFeature(features=features[:2])]
    with pytest.raises(InputError, match=f"rows of several sequences would be wrong: ({LEAKS[family]})"):
        model.forward(packed)
    # They do leak: asked not to look, the model gives other log-probabilities.
    model.set_processor(InputProcessor())
    alone = np.concatenate(model.forward(features[:2]).logprobs)
    model._packing_fault = None
    together = model.forward(packed).logprobs[0]
    assert np.abs(together - alone).max() > 1e-3


def packed_on_one_rank(path: Path, rows: list[Any]) -> list[str]:
    """Runs on every rank: what is said where the rows of rank 0 alone are refused, and whether training goes on."""
    from twinkle_transformers._embedding_trainer import EmbeddingTrainer

    trainer = EmbeddingTrainer(path, DeviceMesh.from_sizes(device_type="cpu", fsdp_size=2))
    trainer.set_loss("cross_entropy")
    mine = [PackedFeature(features=rows[:2])] if os.environ["RANK"] == "0" else rows[:1]
    said: list[str] = []
    for call in (trainer.forward, trainer.forward_only, trainer.forward_backward, trainer.embed):
        try:
            call(mine)
        except Exception as error:  # of whatever type: the test looks at that
            said.append(f"{type(error).__name__} {error}")
        trainer.zero_grad()
    trainer.forward_backward(rows[:1])
    trainer.close()
    return said


@pytest.mark.timeout(180)
def test_rows_that_are_refused_on_one_rank_do_not_leave_the_others_waiting(two_ranks: Any, checkpoint: Any, features: list[Any]) -> None:
    first, other = two_ranks.run(packed_on_one_rank, checkpoint("olmo_hybrid"), features)
    assert len(first) == len(other) == 4
    assert all(said.startswith("InputError rows of several sequences would be wrong") for said in first)
    assert all(said.startswith("PeerError rank 1 stopped: the rows of another rank") for said in other)


def test_compressed_keys_take_one_sequence_a_row_from_its_first_column(checkpoint: Any, made: Any, features: list[Any]) -> None:
    model = made(checkpoint("deepseek_v4"))
    with pytest.raises(InputError, match=r"DeepseekV4ForCausalLM puts tokens together by stretches of the row.*\(DeepseekV4HCACompressor\)"):
        model.forward([PackedFeature(features=features[:2])])
    model.set_processor(InputProcessor(padding_side="left"))
    with pytest.raises(InputError, match="DeepseekV4ForCausalLM counts from the first column: pad on the right"):
        model.forward(features[:2])


def test_rows_of_the_documented_packing_dataset_train_as_their_sequences_alone(expected: Any, made: Any, features: list[Any]) -> None:
    from twinkle_data import Dataset, PackingDataset

    path, want = expected("qwen3")
    dataset = PackingDataset(
        dataset=Dataset(features),
        max_length=8192,
    )
    model = made(path)
    model.set_loss("cross_entropy")
    rows = list(dataset)
    assert len(rows) == 1
    assert abs(model.forward_backward(rows).loss - want["loss"]) < 1e-6


# Models of other families than those of the parity tests, each with what is special about its attention.
FAMILIES = ["phi3", "olmo2", "glm4", "smollm3", "cohere2", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "opt", "qwen2_moe", "glm4_moe"]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in ("gemma2", "cohere2") else (pytest.mark.full,)) for f in FAMILIES])
def test_packed_and_padded_rows_of_other_families_equal_their_sequences_alone(family: str, expected: Any, made: Any, features: list[Any]) -> None:
    path, want = expected(family)
    model = made(path)
    for processor in (InputProcessor(), InputProcessor(padding_side="left"), InputProcessor(padding_free=True)):
        model.set_processor(processor)
        have = model.forward_only(features, 4).get().logprobs
        assert np.abs(np.concatenate(have) - np.concatenate(want["logprobs"])).max() < 1e-5


def test_bf16_computes_in_bf16_and_trains_in_float32(expected: Any, made: Any, features: list[Any]) -> None:
    path, want = expected("qwen3")
    model = made(path, mixed_precision="bf16")
    model.set_loss("cross_entropy")
    model.set_optimizer("sgd", lr=1e-6)
    before = model.export_weights()
    loss = model.forward_backward(features, 2).loss
    # Two hundred logits of eight bits each: off by their rounding, and not by less than float32 would be.
    assert 1e-5 < abs(loss - want["loss"]) < 2e-2
    gradients = model.export_gradients()
    for name, value in want["gradients"].items():
        assert np.abs(gradients[name] - value).max() < 0.1 * np.abs(value).max() + 1e-3, name
    model.step()
    after = model.export_weights()
    moved = max(float(np.abs(after[name] - before[name]).max()) for name in before)
    assert 0 < moved < 1e-5  # bfloat16 weights of size 0.06 would not move
    assert {tensor.dtype for name, tensor in model.iter_weights()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, pytest.param(torch.optim.Adadelta, marks=pytest.mark.full)])
def test_torch_optimizers_by_class_go_on_bit_for_bit(kind: Any, checkpoint: Any, made: Any, features: list[Any], tmp_path: Path) -> None:
    model = made(checkpoint("qwen2"))
    model.set_loss("cross_entropy")
    model.set_optimizer(kind, lr=0.001, weight_decay=0.1)

    def step() -> float:
        loss = model.forward_backward(features, 2).loss
        model.clip_grad_and_step(1.0)
        return loss

    losses = [step() for _ in range(2)]
    model.save_checkpoint(tmp_path / "state")
    losses += [step() for _ in range(2)]
    want = model.export_weights()
    assert losses[3] < losses[0]
    model.set_optimizer("sgd", lr=0.1)
    model.resume_from_checkpoint(tmp_path / "state")
    assert [step() for _ in range(2)] == losses[2:]
    have = model.export_weights()
    assert all(np.array_equal(have[name], want[name]) for name in want)
    assert model.get_train_configs()["adapters"][""]["optimizer"]["name"] == kind.__name__.lower()


def test_a_checkpoint_whose_bytes_changed_is_refused(checkpoint: Any, made: Any, tmp_path: Path) -> None:
    conformance.check_changed_bytes(made(checkpoint("qwen2")), tmp_path / "state")


def test_a_model_is_saved_whole_and_read_back_by_transformers(checkpoint: Any, made: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = checkpoint("deepseek_v3")
    model = made(source)
    model.save(tmp_path / "saved")
    (tmp_path / "saved" / "model-00002-of-00002.safetensors").write_text("replaced")
    model.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model-00002-of-00002.safetensors").exists()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    origin = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    assert saved.keys() == origin.keys()
    assert all(torch.equal(saved[name], origin[name]) for name in saved)


def test_a_save_that_fails_says_where_and_replaces_nothing(checkpoint: Any, made: Any, tmp_path: Path) -> None:
    model = made(checkpoint("qwen3"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not save to .*file/model: .*; nothing was replaced"):
        model.save(tmp_path / "file" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_of_another_model_is_not_loaded(checkpoint: Any, made: Any) -> None:
    model = made(checkpoint("qwen3"))
    with pytest.raises(CheckpointError, match="has model_type='qwen2', this model has 'qwen3'"):
        model.load(checkpoint("qwen2"))


def test_two_models_attend_each_in_its_own_way_and_leave_transformers_as_it_was(checkpoint: Any, features: list[Any]) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    registries = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [set(registry) for registry in registries]
    first: Any = TransformersModel(checkpoint("qwen3"))
    want = first.forward(features).logprobs
    second = TransformersModel(checkpoint("mistral"), attn_implementation="eager")
    second.set_processor(InputProcessor(padding_free=True))
    second.forward(features)
    assert all(np.array_equal(mine, other) for mine, other in zip(first.forward(features).logprobs, want, strict=True))
    second.close()
    assert all(np.array_equal(mine, other) for mine, other in zip(first.forward(features).logprobs, want, strict=True))
    first.close()
    with pytest.raises(CallOrderError, match="the model is closed"):
        first.forward(features)
    assert [set(registry) for registry in registries] == before
