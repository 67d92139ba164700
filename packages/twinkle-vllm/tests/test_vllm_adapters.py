"""LoRA adapters: from a folder, from memory and by sync; replaced whole; a failed load is an error and never the base model."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twinkle_data import Template
from twinkle_remote import remote_class
from twinkle_sync import CheckpointEngineManager, WeightSender
from twinkle_vllm import AdapterNotLoaded, AdapterRefused, vLLMSampler
from twinkle_vllm.testing import logprob_error

pytestmark = pytest.mark.timeout(300)  # the first test starts the engine

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "none"}
GREEDY = {"temperature": 0, "max_tokens": 6}


def adapter(model, seed):
    """Random matrices for three kinds of modules of a tiny Qwen3, by peft's names."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in CONFIG["target_modules"]:
            made[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(4, module.in_features, generator=generator)
            made[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(module.out_features, 4, generator=generator)
    return made


class merged:
    """The model with an adapter added to its weights."""

    def __init__(self, model, tensors):
        self.model, self.tensors = model, tensors
        self.before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def __enter__(self):
        with torch.no_grad():
            for name, first in self.tensors.items():
                if name.endswith("lora_A.weight"):
                    second = self.tensors[name.replace("lora_A", "lora_B")]
                    self.model.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", "")).add_(second @ first * 2.0)
        return self.model

    def __exit__(self, *exc_info):
        self.model.load_state_dict(self.before)


def written(folder, tensors, config=CONFIG):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def lora_sampler(kit, models):
    return vLLMSampler(models["old"][0], {**kit.ENGINE_ARGS, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2})


@pytest.fixture
def lora(kit, lora_sampler, models, tokenizer):
    kit.load(lora_sampler, models["old"][1])
    lora_sampler.set_template(Template(tokenizer))
    for name in lora_sampler.adapter_names():
        lora_sampler.unload_adapter(name)
    return lora_sampler


def error(sampler, model, prompts, name):
    return logprob_error(sampler, model, prompts, temperature=0.7, max_tokens=6, adapter_name=name)


def test_adapters_from_a_folder_and_from_memory_are_what_peft_would_compute(kit, lora, models, prompts, tmp_path):
    model = models["old"][1]
    first, second = adapter(model, 1), adapter(model, 2)
    folder = written(tmp_path / "first", first)
    lora.load_adapter("first", folder, version=7)
    (folder / "adapter_model.safetensors").unlink()  # not needed any more
    lora.load_adapter_tensors("second", CONFIG, second)
    assert lora.adapter_names() == ["first", "second"]
    assert error(lora, model, prompts, "") < 2e-5
    for name, tensors in (("first", first), ("second", second)):
        assert error(lora, model, prompts, name) > 0.1  # the control: it is not the base model
        with merged(model, tensors):
            assert error(lora, model, prompts, name) < 2e-5
    mixed = lora.sample(prompts[:3], GREEDY, adapter_name=["", "first", "second"])
    alone = [lora.sample([prompt], GREEDY, adapter_name=name)[0] for prompt, name in zip(prompts, ["", "first", "second"], strict=False)]
    assert [r.sequences[0].tokens for r in mixed] == [r.sequences[0].tokens for r in alone]
    assert mixed[1].sequences[0].new_input_feature.weight_version == 7


def test_without_the_repair_requests_without_an_adapter_get_one(lora, models, prompts, monkeypatch):
    """When this fails, vLLM keeps adapters away from them itself and `repair_adapters_on_cpu` can go."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def base_beside_an_adapter():
        return lora.sample([prompts[0]] * 2, GREEDY, adapter_name=["", "it"])[0].sequences[0].tokens

    lora.load_adapter_tensors("it", CONFIG, adapter(models["old"][1], 1))
    alone = lora.sample([prompts[0]], GREEDY)[0].sequences[0].tokens
    assert base_beside_an_adapter() == alone
    repaired: Any = lora_ops.bgmv_shrink
    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", repaired.original)
    assert base_beside_an_adapter() != alone


def test_an_adapter_is_replaced_and_its_cached_prefixes_are_not_used(kit, lora, models, tmp_path):
    model, prompt = models["old"][1], [list(range(3, 50))]  # more than a block of the prefix cache
    for seed in (1, 2, 3, 4):  # more than the engine has room for
        tensors = adapter(model, seed)
        lora.load_adapter("it", written(tmp_path / "same", tensors))
        with merged(model, tensors):
            assert error(lora, model, prompt, "it") < 2e-5
    assert lora.adapter_names() == ["it"]


def test_a_base_update_leaves_the_adapters(kit, lora, models, prompts):
    tensors = adapter(models["old"][1], 1)
    lora.load_adapter_tensors("it", CONFIG, tensors)
    new = models["new"][1]
    kit.load(lora, new, version=2)
    assert error(lora, new, prompts, "") < 2e-5
    with merged(new, tensors):
        assert error(lora, new, prompts, "it") < 2e-5


def test_a_failed_load_is_an_error_and_the_old_adapter_stays(kit, lora, models, prompts, tmp_path):
    model = models["old"][1]
    tensors = adapter(model, 1)
    lora.load_adapter_tensors("it", CONFIG, tensors)
    name = next(iter(tensors))
    other_module = {
        "base_model.model.model.layers.0.mlp.router.lora_A.weight": torch.ones(4, 3),
        "base_model.model.model.layers.0.mlp.router.lora_B.weight": torch.ones(3, 4),
    }
    on_the_head = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64), "base_model.model.lm_head.lora_B.weight": torch.ones(300, 4)}

    def renamed(old, new):
        return {name.replace(old, new): tensor for name, tensor in tensors.items()}

    damaged = tmp_path / "damaged"
    written(damaged, tensors)
    (damaged / "adapter_model.safetensors").write_bytes(b"not this")
    for load, message in (
        (lambda: lora.load_adapter("it", tmp_path), r"has no adapter_config\.json"),
        (lambda: lora.load_adapter("it", damaged), "cannot be read"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, {}), "has no matrix"),
        (lambda: lora.load_adapter_tensors("it", {}, tensors), "has no rank"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, {name: tensors[name]}), "needs lora_A.weight and lora_B.weight"),
        (lambda: lora.load_adapter_tensors("it", {**CONFIG, "r": 64}, adapter_of_rank(tensors, 64)), "max_lora_rank|rank"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, other_module), "router"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, on_the_head), "lm_head"),
        # vLLM takes these, and samples from the base model, from parts of the matrices, at another scale, or gives NaN to the whole batch.
        (lambda: lora.load_adapter_tensors("it", CONFIG, renamed("layers.1.", "layers.7.")), r"layers\.7.*which the model does not have"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, renamed("model.layers", "foo.layers")), r"foo\.layers.*which the model does not have"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, {n: t[:, :32] if "lora_A" in n else t for n, t in tensors.items()}), r"maps 32 to \d+ .*64"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, {n: t[:16] if "lora_B" in n else t for n, t in tensors.items()}), r"maps \d+ to 16 "),
        (lambda: lora.load_adapter_tensors("it", {**CONFIG, "r": 8}, tensors), "rank 4, and its configuration says 8"),
        (lambda: lora.load_adapter_tensors("it", CONFIG, {n: t * float("nan") for n, t in tensors.items()}), "not finite"),
    ):
        with pytest.raises(AdapterRefused, match=message):
            load()
    with merged(model, tensors):
        assert error(lora, model, prompts, "it") < 2e-5
    with pytest.raises(AdapterNotLoaded, match=r"no adapter 'else' is loaded in this sampler; loaded are 'it'"):
        lora.sample(prompts, adapter_name="else")
    lora.unload_adapter("it")
    with pytest.raises(AdapterNotLoaded):
        lora.score(prompts, adapter_name="it")


def adapter_of_rank(tensors, rank):
    return {name: torch.ones((rank, t.shape[1]) if "lora_A" in name else (t.shape[0], rank)) for name, t in tensors.items()}


def test_a_sampler_without_room_for_adapters_says_so(sampler, models):
    with pytest.raises(AdapterRefused, match="'enable_lora': True"):
        sampler.load_adapter_tensors("it", CONFIG, adapter(models["old"][1], 1))


@remote_class()
class Trainer(WeightSender):
    def __init__(self, model):
        self.model = model
        self.seed = 1

    def iter_weights(self):
        yield from ((name, tensor.detach()) for name, tensor in self.model.named_parameters())

    def iter_adapter(self, adapter_name):
        yield from adapter(self.model, self.seed).items()

    def adapter_config(self, adapter_name):
        return CONFIG


def test_a_trainers_adapter_comes_by_sync(kit, lora, models, prompts):
    model = models["old"][1]
    trainer = Trainer(model)
    manager = CheckpointEngineManager(model=trainer, sampler=lora, bucket_size_bytes=1 << 12)
    for trainer.seed in (5, 6):
        report = manager.sync_weights("lora", adapter_name="policy")
        with merged(model, adapter(model, trainer.seed)):
            assert error(lora, model, prompts, "policy") < 2e-5
        sequence = lora.sample(prompts[:1], GREEDY, adapter_name="policy")[0].sequences[0]
        assert set(sequence.weight_versions) == {report.version}
    assert report.version == 2
    assert lora.loaded_version == 0
