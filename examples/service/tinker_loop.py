"""The official `tinker` SDK against a Twinkle server: supervised steps, a reinforcement step, a saved state.

twinkle-server launch                     # prints a key
pip install tinker transformers
TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-... python examples/service/tinker_loop.py
"""

import argparse
from typing import Any

import numpy as np
import tinker
from tinker import types

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a base model of the server; by default its first")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--rank", type=int, default=8)
arguments = parser.parse_args()

PAIRS = [("2 + 2 =", " 4"), ("3 + 4 =", " 7"), ("5 - 1 =", " 4"), ("9 - 6 =", " 3")]


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """A sequence, shifted: position n predicts token n + 1, and the inputs belong to the targets."""
    loss_inputs: Any = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=loss_inputs)


service = tinker.ServiceClient()
model = str(arguments.model or tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name)
trainer = service.create_lora_training_client(base_model=model, rank=arguments.rank).result()
tokenizer = trainer.get_tokenizer()

# Supervised: only the answers are trained on.
data = []
for question, answer in PAIRS:
    prompt, completion = tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id]
    data.append(datum(prompt + completion, weights=[0.0] * (len(prompt) - 1) + [1.0] * len(completion)))
for step in range(arguments.steps):
    # Both are under way before either is waited for; the server runs them in order.
    result, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    stepped.result()
    print(f"step {step}: loss {result.result().metrics['loss:sum']:.3f}")

# Reinforcement: samples of the current weights, rewarded for being short.
sampler = trainer.save_weights_and_get_sampling_client().result()
prompt = tokenizer.encode(PAIRS[0][0])
sampled = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=8, sampling_params=types.SamplingParams(max_tokens=8)).result()
rewards = np.array([-len(sequence.tokens) for sequence in sampled.sequences], float)
advantages = rewards - rewards.mean()
rollouts = []
for sequence, advantage in zip(sampled.sequences, advantages, strict=True):
    tokens, logprobs, given = list(sequence.tokens), list(sequence.logprobs or ()), [0.0] * (len(prompt) - 1)
    rollouts.append(datum(prompt + tokens, logprobs=given + logprobs, advantages=given + [float(advantage)] * len(tokens)))
result = trainer.forward_backward(rollouts, "importance_sampling")
trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
print(f"mean reward {rewards.mean():.2f}, largest gap of log-probabilities {result.result().metrics['logprob_gap:max']:.1e}")

path = trainer.save_state("example", overwrite=True).result().path
print("saved", path)
service.close("success").result()
