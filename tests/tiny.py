"""A tiny real model for tests: Qwen3 architecture, byte-level tokenizer, ChatML with tools."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}\
{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'tool' %}{{ '<tool_response>' }}{% endif %}
{%- if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}\
{{ p.text }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' }}{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}{{ '</tool_call>' }}{% endfor %}
{%- if m.role == 'tool' %}{{ '</tool_response>' }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def make_tiny_model(folder: Path, *, tied: bool = True, seed: int = 0, context: int = 2048) -> Path:
    """Write the model to `folder` and return it."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(m, special=False) for m in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=context, tie_word_embeddings=tied,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the default spread of 0.02 samples almost uniformly
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
