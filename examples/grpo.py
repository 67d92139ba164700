"""GRPO in about 60 lines: a Megatron actor and a vLLM sampler in distinct device groups.

    python examples/grpo.py --model FOLDER [--mode local | ray] [--steps N]

FOLDER is a Hugging Face checkpoint with a tokenizer; `twinkle sft` writes one (its run folder's `checkpoint`). In a checkout python is
.venv/bin/python.
"""

import argparse
from dataclasses import replace

import twinkle
from twinkle import (
    CheckpointEngineManager,
    DataLoader,
    DeviceGroup,
    DeviceMesh,
    MegatronModel,
    SamplingParams,
    Template,
    group_advantages,
    vLLMSampler,
)
from twinkle_data.toy import arithmetic_task, exact_match

parser = argparse.ArgumentParser(description="GRPO on arithmetic.")
parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
parser.add_argument("--mode", choices=["local", "ray"], default="ray")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--num-samples", type=int, default=8)
args = parser.parse_args()


def train() -> None:
    groups = [DeviceGroup(name="actor", ranks=1, device_type="cpu"), DeviceGroup(name="sampler", ranks=1, device_type="cpu")]
    actor_mesh = DeviceMesh.from_sizes(dp_size=1)
    sampler_mesh = DeviceMesh.from_sizes(dp_size=1)

    with twinkle.initialize(args.mode, groups=groups):
        template = Template(args.model)
        dataloader = DataLoader(arithmetic_task().train, batch_size=16, shuffle=True, seed=0, num_epochs=None)
        sampler = vLLMSampler(args.model, engine_args={"max_model_len": 64}, device_mesh=sampler_mesh, remote_group="sampler")
        sampler.set_template(template)
        actor = MegatronModel(args.model, device_mesh=actor_mesh, remote_group="actor")
        actor.set_loss("grpo", epsilon=0.2, epsilon_high=0.28)
        actor.set_optimizer("adam", lr=2e-4, betas=(0.9, 0.95))
        weights = CheckpointEngineManager(model=actor, sampler=sampler)
        params = SamplingParams(max_tokens=11, temperature=1.0, num_samples=args.num_samples)

        for step, problems in zip(range(1, args.steps + 1), dataloader, strict=False):
            weights.sync_weights()
            prompts = template.batch_encode(problems, add_generation_prompt=True)
            sampler_output = [response.raise_for_error() for response in sampler.sample(prompts, params)]
            input_data = [sequence.new_input_feature for response in sampler_output for sequence in response.sequences]
            rewards = [
                float(exact_match(sequence, problem.user_data["answer"]))
                for problem, response in zip(problems, sampler_output, strict=True)
                for sequence in response.sequences
            ]
            advantages = group_advantages(rewards, args.num_samples)
            input_data = [replace(feature, advantages=float(a)) for feature, a in zip(input_data, advantages, strict=True)]
            actor.forward_backward(input_data)
            actor.clip_grad_and_step(1.0)
            metrics = actor.calculate_metric()
            print(f"step {step}  reward {sum(rewards) / len(rewards):.3f}  loss {metrics['loss']:.5f}", flush=True)


if __name__ == "__main__":
    train()
