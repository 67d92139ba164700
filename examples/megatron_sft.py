"""Fine-tune a model on a JSONL file of conversations, in any layout of megatron-core: the losses are the same.

python examples/megatron_sft.py --write-smollm2 smollm2                                     SmolLM2-135M-Instruct, once
python examples/megatron_sft.py --model smollm2                                             one process
torchrun --nproc-per-node 3 examples/megatron_sft.py --model smollm2 --tp 3                 tensor and sequence parallel
torchrun --nproc-per-node 2 examples/megatron_sft.py --model smollm2 --pp 2                 two pipeline stages
torchrun --nproc-per-node 2 examples/megatron_sft.py --model smollm2 --dp 2 --lora 16       two data ranks, an adapter only

Each line of the file is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}.
"""

import argparse
from pathlib import Path

import twinkle
from twinkle import DataLoader, Dataset, DeviceGroup, DeviceMesh, MegatronModel, Template
from twinkle.recipes import write_smollm2
from twinkle_mesh import launcher_rank

parser = argparse.ArgumentParser(description="SFT on a JSONL file with megatron-core.")
parser.add_argument("--write-smollm2", type=Path, metavar="FOLDER", help="write SmolLM2-135M-Instruct there, and stop")
parser.add_argument("--model", help="a folder with a Hugging Face checkpoint and a tokenizer with a chat template")
parser.add_argument("--data", default=str(Path(__file__).with_name("capitals.jsonl")), help="the conversations")
parser.add_argument("--dp", type=int, default=1, help="data parallel ranks")
parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
parser.add_argument("--lora", type=int, default=0, metavar="R", help="train an adapter of that rank instead of the model")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--save", help="a folder for the result: a checkpoint, or the adapter in peft's format")
args = parser.parse_args()


def train() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=args.dp, tp_size=args.tp, pp_size=args.pp, sequence_parallel=args.tp > 1)
    rows = Dataset(args.data).conversations().encode(Template(args.model))
    name = "adapter" if args.lora else ""
    with twinkle.initialize(groups=[DeviceGroup("actor", mesh.world_size, "cpu")]):
        loader = DataLoader(rows, batch_size=8, shuffle=True, seed=0, device_mesh=mesh, num_epochs=None)
        model = MegatronModel(args.model, device_mesh=mesh, remote_group="actor")
        if args.lora:
            model.add_adapter_to_model(name, {"r": args.lora, "lora_alpha": 2 * args.lora})
        model.set_loss("cross_entropy", adapter_name=name)
        model.set_optimizer("adamw", lr=args.lr, eps=1e-6, adapter_name=name)
        model.set_lr_scheduler("cosine", warmup_steps=2, total_steps=max(args.steps, 3), adapter_name=name)
        for step, batch in zip(range(1, args.steps + 1), loader, strict=False):
            output = model.forward_backward(batch, micro_batch_size=2, adapter_name=name)
            norm = model.clip_grad_and_step(1.0, adapter_name=name)
            if launcher_rank() == 0:
                print(f"step {step}  loss {output.loss:.6f}  gradient norm {norm:.5f}", flush=True)
        if args.save:
            model.save(args.save, adapter_name=name)
        model.close()


if __name__ == "__main__":
    if args.write_smollm2:
        write_smollm2(args.write_smollm2)
    elif args.model:
        mark = "adapter_config.json" if args.lora else "config.json"
        if args.save and any(Path(args.save).glob("*")) and not (Path(args.save) / mark).is_file():
            parser.error(f"--save {args.save}: the folder holds other files, and what is there would be replaced; name another")
        train()
    else:
        parser.error("give --model FOLDER, or --write-smollm2 FOLDER first")
