"""Expert parallelism: bytes that travel beside the least that the routing needs, and a layer's time beside transformers' own experts.

    ./dev bench ep [--repeat 15] [--tokens 1024]

Bytes are counted on two ranks. Times are of forward and backward of one layer's experts with ep_size=1, one thread, by transformers' grouped matrix
multiply, and through our four stages, of the processor.
"""

import argparse
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from paired import pairs

HIDDEN, WIDTH, EXPERTS, CHOSEN = 512, 512, 16, 4


def experts() -> Any:
    """The experts of one Qwen3-MoE layer."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, num_hidden_layers=1
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block


def count_bytes(tokens: int) -> tuple[int, int, int]:
    """Runs on two ranks: bytes of tokens and results sent in forward and in backward, and the bytes of counts."""
    import torch.distributed as dist

    from twinkle_transformers import apply_expert_parallel

    block = experts()
    apply_expert_parallel(block, dist.group.WORLD)
    sent, counts, own = [0, 0], 0, dist.all_to_all_single
    phase = 0

    def counted(output: Any, tensor: Any, *rest: Any, **options: Any) -> Any:
        nonlocal counts
        if tensor.is_floating_point():
            sent[phase] += tensor.nbytes
        else:
            counts += tensor.nbytes
        return own(output, tensor, *rest, **options)

    dist.all_to_all_single = counted
    try:
        out = block(torch.randn(1, tokens, HIDDEN, requires_grad=True))
        phase = 1
        out.sum().backward()
    finally:
        dist.all_to_all_single = own
    return sent[0], sent[1], counts


def layer_times(tokens: int, repeat: int) -> None:
    from twinkle_transformers import apply_expert_parallel

    torch.set_num_threads(1)
    plain, ours = experts(), experts()
    apply_expert_parallel(ours, None)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    index = torch.rand(tokens, EXPERTS).topk(CHOSEN).indices
    weights = torch.rand(tokens, CHOSEN, requires_grad=True)

    def step(module: Any) -> Any:
        out = module(hidden, index, weights)
        out.sum().backward()
        return out.detach()

    assert (step(ours.experts) - step(plain.experts)).abs().max() < 1e-4
    raw_s, ours_s, ratio = pairs(lambda: step(plain.experts), lambda: step(ours.experts), repeat, warm_up=2, clock=time.process_time)
    took = f"{ours_s * 1e3:.1f} ms, transformers {raw_s * 1e3:.1f} ms: {ratio:.3f}"
    print(f"{tokens} tokens, {EXPERTS} experts, {CHOSEN} a token, ep_size 1: {took} (aim 1.05)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="pairs of measurements")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    from twinkle_train.testing import RankPool

    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        pool = RankPool(2, folder)
        found = pool.run(count_bytes, arguments.tokens, timeout_s=200)
        pool.stop()
    least = arguments.tokens * CHOSEN * HIDDEN * 4
    for rank, (forward, backward, counts) in enumerate(found):
        # Results come to the rank of the tokens: what both ranks send back is what both have sent.
        print(f"rank {rank}: forward {forward} bytes, backward {backward}; counts {counts} bytes")
    for name, which in (("forward", 0), ("backward", 1)):
        total = sum(each[which] for each in found)
        print(f"bytes in {name}, both ranks: {total / (2 * 2 * least):.4f} of tokens x k x hidden, once each way (aim 1)")
    layer_times(arguments.tokens, arguments.repeat)


if __name__ == "__main__":
    main()
