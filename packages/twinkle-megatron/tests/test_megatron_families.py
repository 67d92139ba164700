"""Which models and layouts are refused, with which reason; and bridges of one's own."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from twinkle_megatron import LayoutError, UnsupportedModelError, check_layout
from twinkle_mesh import DeviceMesh

SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("qwen3_moe", {"tp_size": 2}, "tp_size=2 with experts needs sequence_parallel=True"),
        ("qwen3_moe", {"dp_size": 3, "ep_size": 3}, r"ep_size=3 does not divide the model's 4 experts: use an ep_size among \[1, 2, 4\]"),
        ("qwen3_moe", {"tp_size": 2, "etp_size": 1, **SP}, "etp_size=1 differs from tp_size=2 without expert parallelism"),
        ("qwen3_moe", {"dp_size": 6, "ep_size": 2, "etp_size": 3}, "etp_size=3 does not divide the model's 32 features of an expert"),
        ("qwen3", {"dp_size": 2, "ep_size": 2}, "ep_size=2: a 'qwen3' model has no experts"),
        ("qwen3", {"dp_size": 2, "etp_size": 2}, "etp_size=2: a 'qwen3' model has no experts to split"),
        ("deepseek_v3", {"tp_size": 3, **SP}, "tp_size=3 does not divide the model's 4 attention heads"),
        ("qwen3_moe", {"dp_size": 2, "ep_fsdp_size": 2}, "ep_fsdp_size=2: MegatronModel has no such axis.*use_distributed_optimizer"),
        ("qwen3", {"ulysses_size": 2}, "ulysses_size=2: MegatronModel has no such axis.*cp_size splits sequences"),
        ("qwen3", {"pp_size": 4}, "makes 4 stages, and the model has 2 layers"),
    ],
)
def test_a_layout_that_megatron_core_cannot_do_is_refused_with_the_reason(family: str, sizes: Any, words: str, checkpoint: Any) -> None:
    with pytest.raises(LayoutError, match=words):
        check_layout(checkpoint(family), DeviceMesh.from_sizes(device_type="cpu", **sizes))


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 2, "dp_size": 2, "ep_size": 4, "etp_size": 1, **SP}, {"cp_size": 2, "ep_size": 2}, {"pp_size": 2, "dp_size": 4, "ep_size": 4}],
)
def test_a_layout_that_fits_is_accepted_without_building_anything(sizes: Any, checkpoint: Any) -> None:
    check_layout(checkpoint("qwen3_moe"), DeviceMesh.from_sizes(device_type="cpu", **sizes))


def test_uneven_stages_are_asked_for_by_name(checkpoint: Any) -> None:
    path = checkpoint("qwen3", num_hidden_layers=5)
    mesh = DeviceMesh.from_sizes(pp_size=2, device_type="cpu")
    with pytest.raises(LayoutError, match=r"do not divide the model's 5 layers .* for example layers_per_stage=\(3, 2\)"):
        check_layout(path, mesh)
    check_layout(path, mesh, (2, 3))
    for wrong in ((2, 2), (5, 0), (1, 2, 2)):
        with pytest.raises(LayoutError, match="it must be 2 numbers of at least 1 that add up to 5"):
            check_layout(path, mesh, wrong)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("mixtral", {"sliding_window": 128}, "sliding_window = 128"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05; transformers norms the latents"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("deepseek_v3", {"topk_group": 2}, "num_experts_per_tok must be 2 x topk_group"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'linear' is not supported with latent",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("qwen3_moe", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("qwen3_moe", {"model_type": "gpt_oss"}, "'gpt_oss' model; MegatronModel supports deepseek_v3, glm4_moe.*bridge of your own"),
    ],
)
def test_what_megatron_core_would_compute_differently_is_refused(family: str, change: Any, words: str, checkpoint: Any, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(family), tmp_path / "changed")
    file = tmp_path / "changed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UnsupportedModelError, match=words):
        check_layout(tmp_path / "changed", DeviceMesh.from_sizes(device_type="cpu"))


BRIDGE = """
from mbridge.models.qwen3 import Qwen3Bridge
from twinkle_megatron import UnsupportedModelError
from twinkle_megatron.bridges import MBridge, mended

class AcmeBridge(MBridge):
    def _names(self, hf_config):
        return mended("qwen3")

    @staticmethod
    def check(hf_config):
        if hf_config.hidden_act != "silu":
            raise UnsupportedModelError("acme models have silu")
"""

SCRIPT = """
import sys
import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

class AcmeConfig(Qwen3Config):
    model_type = "acme"

class Acme(Qwen3ForCausalLM):
    config_class = AcmeConfig

AutoConfig.register("acme", AcmeConfig)
AutoModelForCausalLM.register(AcmeConfig, Acme)
from twinkle_data import InputFeature
from twinkle_megatron import MegatronModel, UnsupportedModelError

sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
model = Acme(AcmeConfig(**sizes)).float()
model.save_pretrained(sys.argv[1])
trainer = MegatronModel(sys.argv[1])
exported = trainer.export_weights()
for name, parameter in model.named_parameters():
    assert np.array_equal(exported[name], parameter.detach().numpy()), name
trainer.set_loss("cross_entropy")
assert trainer.forward_backward([InputFeature(input_ids=[3, 4, 5])]).loss > 0
trainer.close()
Acme(AcmeConfig(**sizes, hidden_act="gelu")).save_pretrained(sys.argv[1])
try:
    MegatronModel(sys.argv[1])
except UnsupportedModelError as error:
    assert "acme models have silu" in str(error)
    print("fine")
"""


def test_a_bridge_of_ones_own_registers_through_an_entry_point(tmp_path: Path) -> None:
    info = tmp_path / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[twinkle_megatron.bridges]\nacme = acme_bridge:AcmeBridge\n")
    (tmp_path / "site" / "acme_bridge.py").write_text(textwrap.dedent(BRIDGE))
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{SCRIPT}"
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "model")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ran.stdout.strip().endswith("fine"), ran.stderr
