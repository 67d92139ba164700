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
GEMMA = """
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '<start_of_turn>model\n' -}}{% generation %}{{- message['content'] | trim + '<end_of_turn>' -}}{% endgeneration %}{{- '\n' -}}
{%- else -%}{{- '<start_of_turn>' + message['role'] + '\n' + message['content'] | trim + '<end_of_turn>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""
# Like DeepSeek-V3's: no line breaks around roles, arguments of calls joined as text, calls told from texts by `content is none`.
DEEPSEEK = """
{%- set ns = namespace(is_tool=false, system='') -%}
{%- for message in messages if message['role'] == 'system' -%}{%- set ns.system = ns.system + message['content'] -%}{%- endfor -%}
{{- bos_token -}}{{- ns.system -}}
{%- for tool in tools or [] -%}{{- '\n## ' + tool['function']['name'] -}}{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set ns.is_tool = false -%}{{- '<|User|>' + message['content'] -}}{%- endif -%}
{%- if message['role'] == 'assistant' and message['content'] is none -%}
{%- set ns.is_tool = false -%}
{{- '<|Assistant|>' -}}{% generation %}
{%- for call in message['tool_calls'] -%}
{{- '<|call|>' + call['function']['name'] + '\n' + call['function']['arguments'] -}}
{%- endfor -%}{{- eos_token -}}{% endgeneration %}
{%- endif -%}
{%- if message['role'] == 'assistant' and message['content'] is not none -%}
{%- if not ns.is_tool -%}{{- '<|Assistant|>' -}}{%- endif -%}
{%- set ns.is_tool = false -%}
{% generation %}{{- message['content'].split('</think>')[-1] + eos_token -}}{% endgeneration %}
{%- endif -%}
{%- if message['role'] == 'tool' -%}{%- set ns.is_tool = true -%}{{- '<|output|>' + message['content'] + '<|outputs_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.is_tool -%}{{- '<|Assistant|>' -}}{%- endif -%}
"""
# Like GLM-4's: nothing ends an assistant's turn but the token that opens the next one.
GLM = """
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{- '<|system|>\n' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>\n' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>\n' -}}{%- endif -%}
{{- message['content'] or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name -}}
{%- for key, value in call.function.arguments.items() -%}{{- '\n' + key + '=' + (value | tojson) -}}{%- endfor -%}{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif message['role'] == 'tool' -%}{{- '<|observation|>\n' + message['content'] -}}
{%- else -%}{{- '<|' + message['role'] + '|>\n' + message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""
# Like Qwen3's: tools in a system turn, calls and answers as JSON in tags, reasoning kept behind the last question only.
QWEN3 = """
{%- if tools -%}
{{- '<|im_start|>system\n' -}}{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
{{- '<tools>' -}}{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}{{- '\n</tools><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if message.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- message.content if message.content is string else '' -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}{{- call.function.arguments -}}{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
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
    "gemma": (GEMMA, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "deepseek": (DEEPSEEK, "<|begin|>", "<|end|>", ["<|User|>", "<|Assistant|>", "<|call|>", "<|output|>", "<|outputs_end|>"]),
    "glm": (GLM, None, "<|endoftext|>", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]),
    "qwen3": (QWEN3, None, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
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
