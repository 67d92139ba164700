"""One rank of a pool of processes (see conftest.RankPool): runs jobs that come over stdin as pickles, answers over stdout.

Started as `python megatron_rank.py RANK WORLD_SIZE STORE_FILE TIMEOUT_S`. The ranks live for many tests, since importing
torch, transformers and megatron-core takes longer than all that is tested.
"""

import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta


def main() -> None:
    rank, world_size, store_file, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})

    import torch.distributed as dist

    store = dist.FileStore(store_file, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    while True:
        try:
            path, name, args, kwargs = pickle.load(jobs)
        except EOFError:
            return
        try:
            spec = importlib.util.spec_from_file_location("jobs_of_" + os.path.basename(path).removesuffix(".py"), path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            answer = (True, getattr(module, name)(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
