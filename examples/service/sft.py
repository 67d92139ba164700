"""Supervised fine-tuning of a LoRA adapter on a server, from a machine without torch.

    twinkle-server launch                    a server with a small model; it prints the two variables to set
    python examples/service/sft.py           this script, with TWINKLE_SERVER_URL and TWINKLE_SERVER_TOKEN set

Against a local script only the imports and the construction differ: compare examples/sft.py.
"""

import argparse

from twinkle_client import InputFeature, LoraConfig, TransformersModel, TwinkleClient, vLLMSampler

parser = argparse.ArgumentParser(description="SFT of a LoRA adapter on a server.")
parser.add_argument("--model", default="tiny-qwen3", help="the base model's name on the server")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

PROMPT, ANSWER = [5, 6], [7, 8, 9, 10]


def train(client: TwinkleClient) -> None:
    model = TransformersModel(args.model)
    run = model.add_adapter_to_model("example", LoraConfig(r=8, lora_alpha=32), save_dir="examples")
    model.set_loss("cross_entropy", adapter_name="example")
    model.set_optimizer("adam", lr=1e-2, adapter_name="example")
    row = InputFeature(input_ids=PROMPT + ANSWER, labels=[-100] * len(PROMPT) + ANSWER)
    for step in range(1, args.steps + 1):
        output = model.forward_backward([row], adapter_name="example")
        model.clip_grad_and_step(1.0, adapter_name="example")
        print(f"step {step}  loss {output.loss:.5f}", flush=True)

    saved = model.save(adapter_name="example", checkpoint_type="sampler_weights")
    (response,) = vLLMSampler(args.model).sample([PROMPT], {"max_tokens": 4, "temperature": 0.0}, adapter_path=saved.twinkle_path)
    print(f"sampled {response.raise_for_error().sequences[0].tokens}, trained on {ANSWER}")
    for checkpoint in client.list_checkpoints(run.training_run_id):
        print(f"{checkpoint.twinkle_path}  {checkpoint.size_bytes} bytes")


if __name__ == "__main__":
    with TwinkleClient(session_metadata={"example": "sft"}) as client:
        train(client)
