"""Supervised fine-tuning in about 40 lines. The same file, unchanged (in a checkout the programs are in .venv/bin):

python examples/sft.py                                       one process
torchrun --nproc-per-node 2 examples/sft.py                  two data parallel ranks
python examples/sft.py --mode ray --dp 2                     the same two ranks as Ray workers
"""

import argparse
import tempfile

import twinkle
from twinkle import DataLoader, DeviceGroup, DeviceMesh, MegatronModel, Template
from twinkle.recipes import write_tiny_qwen3
from twinkle_data.toy import arithmetic_task, toy_tokenizer, with_response
from twinkle_mesh import launcher_world_size

parser = argparse.ArgumentParser(description="SFT of a tiny Qwen3 on arithmetic.")
parser.add_argument("--mode", choices=["local", "ray"], default="local")
parser.add_argument("--dp", type=int, default=launcher_world_size(), help="data parallel ranks")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()


def train(model_dir: str) -> None:
    problems = [with_response(problem) for problem in arithmetic_task(num_problems=2000).train]
    tokenizer = toy_tokenizer(message.content for problem in problems for message in problem.messages)
    write_tiny_qwen3(model_dir, tokenizer, seed=0)
    template = Template(model_dir)
    mesh = DeviceMesh.from_sizes(dp_size=args.dp)
    group = DeviceGroup(name="actor", ranks=args.dp, device_type="cpu")

    with twinkle.initialize(args.mode, groups=[group]):
        dataloader = DataLoader(problems, batch_size=32, shuffle=True, seed=0, device_mesh=mesh, num_epochs=None)
        model = MegatronModel(model_dir, device_mesh=mesh, remote_group="actor")
        model.set_loss("cross_entropy")
        model.set_optimizer("adam", lr=1e-3)
        model.set_lr_scheduler("constant", warmup_steps=10)
        for step, batch in zip(range(1, args.steps + 1), dataloader, strict=False):
            output = model.forward_backward(template.batch_encode(batch))
            model.clip_grad_and_step(1.0)
            print(f"step {step}  loss {output.loss:.7f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
