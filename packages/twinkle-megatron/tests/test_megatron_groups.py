"""What models of different layouts leave behind in one process when they follow one another: nothing."""

import os
from pathlib import Path
from typing import Any

LAYOUTS: list[dict[str, Any]] = [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}]


def polling_threads_after_each_layout(path: Path, rows: list[Any]) -> list[int]:
    from twinkle_megatron import MegatronModel
    from twinkle_mesh import DeviceMesh

    counts = []
    for sizes in LAYOUTS:
        model = MegatronModel(str(path), device_mesh=DeviceMesh.from_sizes(device_type="cpu", **sizes), mixed_precision="no")
        model.set_loss("cross_entropy")
        model.set_optimizer("sgd", lr=0.1)
        model.forward_backward(rows[:2])
        model.close()
        del model
        names = (Path("/proc/self/task") / task / "comm" for task in os.listdir("/proc/self/task"))
        counts.append(sum(name.read_text().startswith("gloo") for name in names))
    return counts


def test_a_closed_models_process_groups_end_with_it(two_ranks, checkpoint, features):
    counts = two_ranks.run(polling_threads_after_each_layout, checkpoint("qwen3"), features)[0]
    # The first count has the groups of one layout, which stay until another comes; other tests may have left them too.
    assert counts[0] > 0
    assert counts == [counts[0]] * len(LAYOUTS)
