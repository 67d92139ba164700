"""megatron-core's RankGenerator, cut out of the installed source: importing megatron.core imports torch and takes 20 s."""

from __future__ import annotations

import ast
import importlib.metadata
from typing import Any

ORDER = "tp-cp-ep-dp-pp"  # megatron-core's default


def load_rank_generator() -> Any:
    """The class `megatron.core.parallel_state.RankGenerator`, or None without megatron-core."""
    try:
        files = importlib.metadata.files("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    assert files is not None
    source = next(file for file in files if file.as_posix().endswith("megatron/core/parallel_state.py")).read_text()
    wanted = ("RankGenerator", "generate_masked_orthogonal_rank_groups")
    body = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in wanted]
    assert len(body) == len(wanted), "megatron-core has another RankGenerator than this expects"
    imports = ast.parse("from typing import List, Optional").body
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module([*imports, *body], type_ignores=[]), "parallel_state.py", "exec"), namespace)
    return namespace["RankGenerator"]
