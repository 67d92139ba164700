"""Tokenizers with the chat templates of well-known model families, trained in a moment from code."""

import os
from collections.abc import Callable

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CORPUS = [
    "What is 12 plus 7? The answer is 19.\n\nYes.",
    "Hello there, how are you today?\n\n\n",
    "Think   first, then  answer. def f(x):\n    return x\n",
] * 20

# Assistant text and end token stand inside a generation block, so that transformers computes an assistant mask of its own.
CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['role'] == 'assistant' -%}{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
LLAMA3 = """
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' -}}
{%- if message['role'] == 'assistant' -%}{% generation %}{{- message['content'] | trim + '<|eot_id|>' -}}{% endgeneration %}
{%- else -%}{{- message['content'] | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""
MISTRAL = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant') -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}{{- '[INST] ' + message['content'] + ' [/INST]' -}}
{%- else -%}{% generation %}{{- ' ' + message['content'] + eos_token -}}{% endgeneration %}{%- endif -%}
{%- endfor -%}
"""
# Like Qwen3's: reasoning is kept in the last turn and dropped from earlier ones.
REWRITING = """
{%- for message in messages -%}
{%- set text = message['content'] -%}
{%- if message['role'] == 'assistant' and not loop.last -%}{%- set text = text.split('</think>')[-1] -%}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# How Llama 3 and Qwen cut text into words: line breaks stay together.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES = {
    "chatml": (CHATML, None, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
    "mistral-spm": (MISTRAL, "<s>", "</s>", []),
    "rewriting": (REWRITING, None, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
}


def _make(family: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, bos, eos, extra = FAMILIES[family]
    special = [token for token in ("<pad>", bos, eos, *extra) if token]
    if family.endswith("spm"):  # SentencePiece style: a space is a visible character, and one is put before the text
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()])
        alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer = Tokenizer(models.BPE())
        by_words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token=bos, eos_token=eos, additional_special_tokens=extra)
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], object]:
    """The tokenizer of a family of templates, made once."""
    made: dict[str, object] = {}

    def get(family: str) -> object:
        if family not in made:
            made[family] = _make(family)
        return made[family]

    return get
