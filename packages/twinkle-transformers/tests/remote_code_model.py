"""A model as checkpoints carry it in their own code: Qwen3 with a ModuleList of experts. transformers_zoo.py copies this file into a checkpoint."""

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM


class ListedConfig(Qwen3Config):
    model_type = "listed_moe"
    num_experts: int = 4
    chosen_experts: int = 2


class ListedExpert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, 32, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, 32, bias=True)
        self.down_proj = nn.Linear(32, config.hidden_size, bias=False)

    def forward(self, hidden):
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class ListedBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.chosen_experts
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(ListedExpert(config) for _ in range(config.num_experts))

    def forward(self, hidden):
        tokens = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view(hidden.shape)


class ListedForCausalLM(Qwen3ForCausalLM):
    config_class = ListedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = ListedBlock(config)
        self.post_init()
