"""MegatronModel in one process: errors, precision, checkpoints, determinism."""

import gc
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from twinkle_data import InputFeature
from twinkle_megatron import CheckpointError, LayoutError, MegatronModel, ModelNotFoundError, UnsupportedModelError
from twinkle_mesh import DeviceMesh
from twinkle_train import CallOrderError, ConfigError, InputError, LossInput, LossOutput
from twinkle_train.testing.interrupts import check_refused, half_checkpoint, interrupted


@pytest.fixture
def build() -> Iterator[Any]:
    models: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        models.append(MegatronModel(*args, **kwargs))
        return models[-1]

    yield make
    for model in models:
        model.close()


def test_an_absent_model_is_an_early_error_that_names_path_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model folder at 'no/such/model'.*save_pretrained") as caught:
        MegatronModel("no/such/model")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        MegatronModel(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        MegatronModel(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 3}, r"tp_size=3 does not divide the model's 4 attention heads .* \[1, 2, 4\]"),
        ({"tp_size": 4}, r"tp_size=4 does not divide the model's 2 key-value heads"),
        ({"pp_size": 3}, r"makes 3 stages, and the model has 2 layers"),
        ({"pp_size": 2, "vpp_size": 2}, r"pp_size=2 x vpp_size=2 makes 4 stages"),
        ({"fsdp_size": 2}, "fsdp_size=2: MegatronModel has no such axis"),
        ({"ulysses_size": 2}, "ulysses_size=2"),
        ({"cp_size": 2}, "the mesh has 2 ranks, and 1 processes run"),
        ({"dp_size": 2}, "the mesh has 2 ranks, and 1 processes run"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_reason(sizes: dict[str, Any], words: str, checkpoint: Any) -> None:
    with pytest.raises(LayoutError, match=words):
        MegatronModel(checkpoint("qwen3"), DeviceMesh.from_sizes(device_type="cpu", **sizes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' model; MegatronModel supports .*llama, mixtral, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn' is not supported"),
    ],
)
def test_what_megatron_would_compute_differently_is_refused(change: dict[str, Any], words: str, checkpoint: Any, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path / "changed")
    config = tmp_path / "changed" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UnsupportedModelError, match=words):
        MegatronModel(tmp_path / "changed")


def test_wrong_options_are_refused(checkpoint: Any, build: Any) -> None:
    path = checkpoint("qwen3")
    with pytest.raises(ConfigError, match="mixed_precision is 'no', 'bf16' or 'fp16'"):
        MegatronModel(path, mixed_precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="recompute"):
        MegatronModel(path, recompute="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="TransformerConfig has no nonsense"):
        MegatronModel(path, transformer_options={"nonsense": 1})
    with pytest.raises(ConfigError, match="sequence_parallel follow from device_mesh"):
        MegatronModel(path, transformer_options={"sequence_parallel": True})
    with pytest.raises(ConfigError, match="'adam' and 'adamw' only"):
        build(path, use_distributed_optimizer=True).set_optimizer("sgd", lr=0.1)


def test_a_token_beyond_the_vocabulary_is_refused(checkpoint: Any, build: Any) -> None:
    with pytest.raises(InputError, match=r"inputs\[1\]\.input_ids has the token 301, .* vocabulary has 301"):
        build(checkpoint("qwen3", vocab_size=301)).forward_only([InputFeature(input_ids=[300]), InputFeature(input_ids=[301, 1])])


def test_two_models_give_bit_identical_logprobs(checkpoint: Any, build: Any, features: list[Any]) -> None:
    path = checkpoint("qwen3")
    first, second = (build(path, seed=seed).forward_only(features).get().logprobs for seed in (0, 1))
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_second_layout_in_one_process_is_refused_until_the_first_is_closed(checkpoint: Any, build: Any) -> None:
    from twinkle_megatron import _parallel

    build(checkpoint("qwen3"))
    other = DeviceMesh.from_sizes(pp_size=2, device_type="cpu")
    # The world has one process, so that only the order of the two checks is bent here.
    object.__setattr__(other, "world_size", 1)
    with pytest.raises(LayoutError, match=r"close\(\) that model"):
        _parallel.acquire(other, seed=0, timeout_s=60)


def test_a_forgotten_model_lets_its_layout_go(checkpoint: Any) -> None:
    model = MegatronModel(checkpoint("qwen3"))
    from twinkle_megatron import _parallel  # not before the model has chosen the platform

    assert _parallel._in_use.users
    del model
    gc.collect()
    assert not _parallel._in_use.users


def test_sharded_optimizer_states_change_nothing_and_can_be_made_anew(checkpoint: Any, build: Any, features: list[Any]) -> None:
    weights = []
    for sharded in (False, True):
        model = build(checkpoint("qwen3"), use_distributed_optimizer=sharded)
        model.set_loss("cross_entropy")
        for _ in range(2):
            # A large eps: Adam divides by a gradient's size, and so amplifies the rounding of small ones.
            model.set_optimizer("adamw", lr=1e-3, eps=1e-3)
            for _ in range(2):
                model.forward_backward(features)
                model.clip_grad_and_step(1.0)
        weights.append(model.export_weights())
    # The two sum the norm over other pieces, so that the clipping factors differ in the last place.
    assert max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[0]) < 1e-6


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"vocab_size": 301}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
        ),
    ],
    ids=["qwen3 odd vocabulary", "qwen3 untied", "qwen2", "llama tied", "llama linear rope", "llama3 rope"],
)
def test_export_is_exact_and_a_saved_model_gives_the_same_logits_in_transformers(
    family: str, sizes: dict[str, Any], checkpoint: Any, build: Any, features: list[Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoint(family, **sizes)
    model = build(path)
    original = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    exported = model.export_weights()
    expected = {name: parameter.detach().numpy() for name, parameter in original.named_parameters()}
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[name], expected[name]) for name in expected)
    model.save(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.as_tensor(features[0].input_ids)[None]
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, original(ids).logits)
        logprobs = original(ids).logits.float().div(features[0].temperature).log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    # float32 log-probabilities of size 6: a few units in the last place.
    np.testing.assert_allclose(model.forward_only(features[:1]).get().logprobs[0][1:], logprobs.numpy(), rtol=0, atol=5e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == AutoTokenizer.from_pretrained(path).get_vocab()


def test_saving_over_a_checkpoint_replaces_it_whole(checkpoint: Any, build: Any, tmp_path: Path) -> None:
    model = build(checkpoint("qwen3"))
    target = tmp_path / "saved"
    model.save(target)
    (target / "stale.safetensors").write_text("old")
    model.save(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    assert not (target / "stale.safetensors").exists()
    model.load(target)


def test_large_checkpoints_are_written_in_shards_that_transformers_reads(checkpoint: Any, build: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    from twinkle_train import _hf_checkpoint

    monkeypatch.setattr(_hf_checkpoint, "MAX_SHARD_BYTES", 200_000)
    model = build(checkpoint("qwen3"))
    model.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 2
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).named_parameters())
    assert all(np.array_equal(read[name].detach().numpy(), weight) for name, weight in model.export_weights().items())
    model.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        # What safetensors raises when the disk fills up while it writes.
        (SafetensorError("I/O error: No space left on device (os error 28)"), "SafetensorError: I/O error: No space left"),
    ],
    ids=["the system's error", "safetensors' error"],
)
def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_litter(
    checkpoint: Any, build: Any, tmp_path: Path, monkeypatch: Any, error: Exception, words: str
) -> None:
    from twinkle_train import _hf_checkpoint

    def full(*args: Any) -> None:
        raise error

    model = build(checkpoint("qwen3"))
    model.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    monkeypatch.setattr(_hf_checkpoint, "_write_tensors", full)
    with pytest.raises(CheckpointError, match=rf"could not save to .*saved: {words}"):
        model.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before


def test_a_checkpoint_that_lacks_a_tensor_is_named(checkpoint: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint("qwen3"), tmp_path / "lacking")
    tensors = load_file(tmp_path / "lacking" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "lacking" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        MegatronModel(tmp_path / "lacking")


def test_files_that_are_cut_off_are_named(checkpoint: Any, build: Any, tmp_path: Path) -> None:
    def cut(source: Path, name: str, file: str) -> Path:
        shutil.copytree(source, tmp_path / name)
        path = tmp_path / name / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return tmp_path / name

    good = checkpoint("qwen3")
    with pytest.raises(CheckpointError, match=r"weights/model.safetensors cannot be read .*: copy or download it again"):
        build(cut(good, "weights", "model.safetensors"))
    with pytest.raises(UnsupportedModelError, match=r"config: config\.json cannot be read"):
        build(cut(good, "config", "config.json"))
    model = build(good)
    with pytest.raises(CheckpointError, match="cannot be read"):
        model.load(tmp_path / "weights")
    model.add_adapter_to_model("a", {"r": 2})
    model.save(tmp_path / "adapter", adapter_name="a")
    with pytest.raises(CheckpointError, match="is no adapter in peft's format"):
        model.load(cut(tmp_path / "adapter", "half", "adapter_model.safetensors"), adapter_name="a")
    with pytest.raises(CheckpointError, match=r"it holds 'adapter_config.json'.* would be deleted"):
        model.save(tmp_path / "adapter")
    model.set_optimizer("adamw", lr=0.01)
    model.save_checkpoint(tmp_path / "state")
    for file in (".metadata", "__0_0.distcp", "generators-0.pt"):
        with pytest.raises(CheckpointError, match="is not what was written"):
            model.resume_from_checkpoint(cut(tmp_path / "state", file.strip("._"), file))
    model.resume_from_checkpoint(tmp_path / "state")
    model.close()
    with pytest.raises(CallOrderError, match="the model is closed"):
        model.save(tmp_path / "late")


def test_loading_another_model_is_refused(checkpoint: Any, build: Any) -> None:
    with pytest.raises(CheckpointError, match="its model_type is qwen2, this model's is qwen3"):
        build(checkpoint("qwen3")).load(checkpoint("qwen2"))


def test_bf16_trains_close_to_float32_with_float32_main_weights(checkpoint: Any, build: Any, features: list[Any], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    losses: dict[str, list[float]] = {}
    for precision in ("no", "bf16"):
        model = build(path, mixed_precision=precision)
        model.set_loss("cross_entropy")
        model.set_optimizer("adamw", lr=1e-3)
        losses[precision] = []
        for _ in range(4):
            losses[precision].append(model.forward_backward(features).loss)
            model.clip_grad_and_step(1.0)
    # bfloat16 has 8 bits: relative errors of 0.4 % a product, much less in the mean over tokens. A loss is about 6.
    np.testing.assert_allclose(losses["bf16"], losses["no"], rtol=0, atol=0.03)
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.1
    model.save(tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_activations_changes_no_gradient(recompute: Any, checkpoint: Any, build: Any, features: list[Any]) -> None:
    gradients = []
    for option in (None, recompute):
        model = build(checkpoint("qwen3"), recompute=option)
        model.set_loss("cross_entropy")
        model.forward_backward(features)
        gradients.append(model.export_gradients())
    assert all(np.array_equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_muon_names_the_package_that_it_needs(checkpoint: Any, build: Any) -> None:
    assert importlib.util.find_spec("emerging_optimizers") is None, "it is installed here: test the optimizer itself"
    model = build(checkpoint("qwen3"))
    with pytest.raises(ImportError, match="emerging-optimizers"):
        model.set_optimizer("muon", lr=0.01, momentum=0.95)
    assert model.get_train_configs()["adapters"][""]["optimizer"] is None


def test_weight_decay_spares_norms_and_biases(checkpoint: Any, build: Any, features: list[Any]) -> None:
    # megatron-core leaves the multiplier of weight decay to its own scheduler.
    model = build(checkpoint("qwen2"))
    model.set_loss("cross_entropy")
    model.set_optimizer("sgd", lr=1e-30, weight_decay=1e28)
    before = model.export_weights()
    model.forward_backward(features)
    model.clip_grad_and_step(1.0)
    after = model.export_weights()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name, weight in before.items() if weight.ndim >= 2}


def test_an_exception_in_the_loss_reaches_the_caller_and_leaves_the_model_usable(checkpoint: Any, build: Any, features: list[Any]) -> None:
    def broken(inputs: LossInput) -> LossOutput:
        raise ZeroDivisionError("the loss is broken")

    model = build(checkpoint("qwen3"))
    model.set_loss(broken)
    with pytest.raises(ZeroDivisionError, match="the loss is broken"):
        model.forward_backward(features, micro_batch_size=2)
    model.zero_grad()
    model.set_loss("cross_entropy")
    assert model.forward_backward(features).loss > 0


def test_a_gpu_model_in_a_process_of_the_cpu_platform_is_refused(checkpoint: Any, build: Any, monkeypatch: Any) -> None:
    build(checkpoint("qwen3"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CPU platform: build GPU models in a process of their own"):
        MegatronModel(checkpoint("qwen3"), DeviceMesh.from_sizes(device_type="cuda"))


def _floats_alive() -> int:
    gc.collect()
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
    return sum(storages.values())


def test_a_model_that_only_scores_holds_no_gradients(build: Any, checkpoint: Any) -> None:
    features = [InputFeature(input_ids=np.arange(1, 6), labels=np.arange(1, 6))]
    model = build(checkpoint("qwen3"))
    weights = sum(array.size for array in model.export_weights().values())
    built = _floats_alive()
    model.forward_only(features)
    scored = _floats_alive()
    assert scored - built < 0.1 * weights
    model.set_loss("cross_entropy")
    model.forward_backward(features)
    assert _floats_alive() - scored > 0.9 * weights


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("adapter_name", "overlap"), [("", False), ("a", False), ("", True)], ids=["base", "adapter", "overlapping"])
def test_an_interrupted_backward_leaves_nothing_behind_zero_grad(
    adapter_name: str, overlap: bool, checkpoint: Any, build: Any, features: list[Any]
) -> None:
    model = build(checkpoint("qwen3"), overlap_communication=overlap)
    if adapter_name:
        model.add_adapter_to_model(adapter_name, {"r": 4})
    model.set_loss("cross_entropy", adapter_name=adapter_name)
    (chunk,) = model._engine.trainable(adapter_name).gradients.chunks

    def interrupt(parameter: torch.Tensor) -> None:
        # Autograd has filled parameter.grad, and megatron-core has not yet taken it from there.
        raise KeyboardInterrupt

    # The first of the model's is the last of a backward's. The first of an adapter's has a gradient of zero.
    parameter = list(chunk.parameters())[-1 if adapter_name else 0]
    hook = parameter.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.forward_backward(features, adapter_name=adapter_name)
    hook.remove()
    assert parameter.grad is not None
    gradients = []
    for _ in range(2):
        model.zero_grad(adapter_name=adapter_name)
        model.forward_backward(features, adapter_name=adapter_name)
        gradients.append(model.export_gradients(adapter_name=adapter_name))
    assert all(np.array_equal(first, gradients[1][name]) for name, first in gradients[0].items())


@pytest.mark.timeout(120)
def test_a_tensor_of_another_shape_is_refused_before_anything_is_changed(checkpoint: Any, build: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint("qwen3")
    model = build(path)
    before = model.export_weights()
    tensors = load_file(path / "model.safetensors")
    for name, shape in (("model.embed_tokens.weight", (309, 64)), ("model.layers.1.self_attn.q_proj.weight", (3, 3))):
        shutil.copytree(path, tmp_path / name)
        changed = {key: torch.zeros(shape) if key == name else tensor + 1 for key, tensor in tensors.items()}
        save_file(changed, tmp_path / name / "model.safetensors")
        for load in (model.load, build):
            with pytest.raises(CheckpointError, match=rf"{name} has another shape than its config.json calls for: \({shape[0]}, "):
                load(tmp_path / name)
    assert all(np.array_equal(weight, before[name]) for name, weight in model.export_weights().items())


@pytest.mark.timeout(240)
def test_a_mixture_of_weights_is_refused_until_a_load_ends_well(checkpoint: Any, build: Any, features: list[Any], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    model = build(path)
    model.add_adapter_to_model("a", {"r": 2})
    for name in ("", "a"):
        model.set_loss("cross_entropy", adapter_name=name)
        model.set_optimizer("adamw", lr=0.01, adapter_name=name)
    model.save(tmp_path / "a", adapter_name="a")
    model.save_checkpoint(tmp_path / "state")
    half_checkpoint(tmp_path / "state", tmp_path / "cut")

    def refused(words: str, names: tuple[str, ...] = ("", "a")) -> None:
        check_refused(model, features, tmp_path / "mixed", words, names)

    with pytest.raises(CheckpointError, match="could not read"):
        model.resume_from_checkpoint(tmp_path / "cut")
    refused("the last load or resume_from_checkpoint did not end")
    model.resume_from_checkpoint(tmp_path / "state")
    model.forward_backward(features)
    interrupted(model._engine._base, "parameters_replaced", lambda: model.load(path))
    with pytest.raises(CallOrderError, match="did not end"):
        model.clip_grad_and_step()
    refused("did not end")
    model.load(path)
    interrupted(model._engine.adapter("a").trainable, "parameters_replaced", lambda: model.load(tmp_path / "a", adapter_name="a"))
    refused("did not end.*'a'", names=("a",))
    model.forward_only(features).get()
    model.load(tmp_path / "a", adapter_name="a")
    model.forward_backward(features)
    interrupted(model._engine._base.gradients, "parameters_changed", model.clip_grad_and_step)
    refused("the last step was interrupted")
    model.resume_from_checkpoint(tmp_path / "state")
    model.forward_backward(features)
    model.clip_grad_and_step()
