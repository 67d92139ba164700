"""Reading checkpoints where weights are divided: what it costs in host memory, and what the other ranks hear of rank 0."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Twelve layers of 12 MiB, of which 8 MiB are one weight.
_LARGE = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8, "num_hidden_layers": 12}
MIB = 1 << 20


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def _growth(call: Any) -> tuple[Any, int]:
    """What a call returns, and by how many bytes this process grew in it, at most."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    result = call()
    return result, _status("VmHWM") - before


def memory_on_rank(small: Path, large: Path, sizes: dict[str, Any]) -> dict[str, float]:
    """Runs on every rank: in MiB, by how much building and loading a model let this process grow, and what it has of the weights."""
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._parameters import local_part
    from twinkle_transformers._trainer import TransformersTrainer

    def build(path: Path) -> TransformersTrainer:
        return TransformersTrainer(path, DeviceMesh.from_sizes(device_type="cpu", **sizes))

    warm = build(small)  # imports, and threads of groups
    warm.load(small)
    warm.close()
    trainer, built = _growth(lambda: build(large))
    mine = sum(local_part(weight.parameter).nbytes for weight in trainer._weights._all)
    _, loaded = _growth(lambda: trainer.load(large))
    trainer.close()
    return {"built": built / MIB, "loaded": loaded / MIB, "mine": mine / MIB}


# A rank has its weights, the one that comes and a few pieces of it; and what the allocator and the interpreter keep.
PIECES, KEPT_MIB = 2.0, 24.0
DIVIDED = {"fsdp2": {"fsdp_size": 2}, "ep2": {"dp_size": 2, "ep_size": 2}, "ep2 ep_fsdp2": {"world_size": 4, "ep_size": 2, "ep_fsdp_size": 2}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if "ep_fsdp" in name else ()) for name in DIVIDED])
def test_a_rank_that_does_not_read_holds_its_weights_and_one_whole(name: str, pools: Any, checkpoint: Any) -> None:
    small, large = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", **_LARGE)
    sizes, whole = DIVIDED[name], (large / "model.safetensors").stat().st_size / MIB
    found = pools(sizes.get("world_size", 2)).run(memory_on_rank, small, large, sizes)
    print(name, whole, found)
    largest = 8.0
    for other in found[1:]:
        assert other["mine"] < 0.55 * whole
        assert other["built"] < other["mine"] + PIECES * largest + KEPT_MIB < 0.85 * whole
        assert other["loaded"] < PIECES * largest + KEPT_MIB
    # It is measured: rank 0 holds all of it.
    assert found[0]["built"] > 0.95 * whole
    assert found[0]["loaded"] > 0.95 * whole


@pytest.mark.full
@pytest.mark.timeout(300)
def test_where_nothing_is_divided_every_rank_holds_all_of_it(two_ranks: Any, checkpoint: Any) -> None:
    small, large = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", **_LARGE)
    whole = (large / "model.safetensors").stat().st_size / MIB
    for rank in two_ranks.run(memory_on_rank, small, large, {"dp_size": 2}):
        assert rank["built"] > 0.95 * whole
        assert rank["loaded"] > 0.95 * whole


def refused_on_rank(good: Path, bad: dict[str, Path], sizes: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """Runs on every rank: what building from, and loading, checkpoints that are no good says; and whether the weights are as they were."""
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers import CheckpointError
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    said: dict[str, str] = {}
    trainer = TransformersTrainer(good, mesh)
    before = trainer.export_weights()
    for name, path in bad.items():
        for how, read in {"built": lambda path=path: TransformersTrainer(path, mesh), "loaded": lambda path=path: trainer.load(path)}.items():
            try:
                read()
            except CheckpointError as error:
                said[f"{name}, {how}"] = str(error)
    after = trainer.export_weights()
    trainer.close()
    return said, all(np.array_equal(after[name], weight) for name, weight in before.items())


@pytest.mark.timeout(300)
def test_what_rank_0_cannot_read_is_refused_on_all_ranks_and_changes_nothing(two_ranks: Any, checkpoint: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    good = checkpoint("qwen3_moe")
    lacking = tmp_path / "lacking"
    shutil.copytree(good, lacking)
    weights = load_file(good / "model.safetensors")
    del weights["model.layers.1.self_attn.k_norm.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    wider = checkpoint("qwen3_moe", moe_intermediate_size=48)
    cut, gone, mixed = (Path(shutil.copytree(good, tmp_path / name)) for name in ("cut", "gone", "mixed"))
    (cut / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-100])
    (gone / "model.safetensors").unlink()
    shutil.copy(wider / "config.json", mixed)
    bad = {"lacking": lacking, "wider": wider, "cut": cut, "gone": gone, "mixed": mixed}
    for said, same in two_ranks.run(refused_on_rank, good, bad, DIVIDED["ep2"]):
        assert said.keys() == {f"{name}, {how}" for name in bad for how in ("built", "loaded")} - {"wider, built"}
        for how in ("built", "loaded"):
            assert f"could not read {cut}: " in said[f"cut, {how}"]
            assert f"could not read {gone}: Error no file named model.safetensors" in said[f"gone, {how}"]
            assert ".mlp.experts." in said[f"mixed, {how}"]
            assert "and its config.json makes it" in said[f"mixed, {how}"]
        assert (
            "lacks 1 weights of Qwen3MoeForCausalLM, ['model.layers.1.self_attn.k_norm.weight']" in said["lacking, built"] == said["lacking, loaded"]
        )
        assert "has model.layers.0.mlp.experts.gate_up_proj of shape (4, 96, 64), this model has it of shape (4, 64, 64)" in said["wider, loaded"]
        assert same


def weights_on_rank(path: Path, rows: Any, sizes: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Runs on every rank: the weights after a step that moves tied ones apart."""
    from twinkle_mesh import DeviceMesh
    from twinkle_transformers._trainer import TransformersTrainer

    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    trainer = TransformersTrainer(path, mesh)
    trainer.set_loss("cross_entropy")
    trainer.set_optimizer("sgd", lr=0.1)
    start = trainer.export_weights()
    loss = trainer.forward_backward(rows[mesh.get_slice(len(rows), int(os.environ["RANK"]))]).loss or 0.0
    trainer.step()
    after = trainer.export_weights()
    trainer.close()
    return {f"start.{name}": weight for name, weight in start.items()} | after, loss


@pytest.mark.full
@pytest.mark.timeout(300)
def test_weights_that_only_the_configuration_ties_are_untied_on_all_ranks(pools: Any, checkpoint: Any, features: list[Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "untied"
    shutil.copytree(checkpoint("qwen3"), folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    ((want, loss),) = pools(1).run(weights_on_rank, folder, features, {})
    (have, other), _ = pools(2).run(weights_on_rank, folder, features, {"fsdp_size": 2})
    assert abs(loss - other) < 1e-6
    assert have.keys() == want.keys()
    assert "lm_head.weight" in have
    assert all(np.abs(have[name] - weight).max() < 1e-6 for name, weight in want.items())


FAMILIES = ["qwen3", "afmoe", "gemma2", "deepseek_v3", "deepseek_v4", "nemotron_h", "qwen3_next", "gpt_oss", "gpt2", "mamba", "listed_moe"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in ("qwen3", "afmoe") else pytest.mark.full) for name in FAMILIES])
def test_a_model_that_is_filled_is_the_one_that_was_read(family: str, checkpoint: Any) -> None:
    import pickle

    import torch

    from twinkle_transformers._loading import empty_model, form_of, give_memory, load_model, take_tensors

    def described(model: Any) -> dict[str, Any]:
        parameters = {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in model.named_parameters()}
        return parameters | {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_buffers()}

    path, options = checkpoint(family), {"attn_implementation": None, "trust_remote_code": True}
    read = load_model(path, **options)
    filled = empty_model(path, pickle.loads(pickle.dumps(form_of(read))), **options)
    assert described(filled) == described(read)
    assert {tensor.device.type for tensor in filled.parameters()} == {"meta"}
    give_memory(filled, torch.device("cpu"))
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        want = read(ids, use_cache=False).logits
        tensors = take_tensors(read, all_buffers=True)
        for name, tensor in [*filled.named_parameters(), *filled.named_buffers()]:
            tensor.copy_(tensors[name])
        assert torch.equal(filled(ids, use_cache=False).logits, want)
