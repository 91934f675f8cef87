"""Makes the quickstart's start policy: a 0.33 M parameter model that knows the format of an agent's
turns, but not how to win.

    python -m jobs.calculator.policy --out models/quickstart --seed 0
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jobs.calculator import tasks
from jobs.calculator.agent import SYSTEM, use_tool

Messages = list[dict[str, Any]]

END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"
OPENERS = ["<|im_start|>system\n", "<|im_start|>user\n", ASSISTANT, "<|im_start|>tool\n"]
# What all conversations have in common, one token each: a tool call is about 9 tokens.
CONSTANTS = [
    SYSTEM,
    "<tool_call>",
    '{"name": "calculator", "arguments": {"expression": "',
    '"}}',
    "</tool_call>",
]
# The list of tools is not shown: this policy knows its one tool from the demonstrations. Arguments
# are printed as `json.dumps` prints them, so that a call in the history has the tokens it was
# sampled with, and every prompt begins with the prompt and the answer before it.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ '' }}
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}
{%- endif -%}
}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""


def main() -> None:
    """Make, teach and save the policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    games = [play(task["question"], chance) for task in chance.choices(tasks.train(), k=8000)]
    make_policy(games, CONSTANTS, args.out, args.seed)


def make_policy(
    games: Sequence[Messages], pieces: Sequence[str], out: Path, seed: int, updates: int = 500
) -> None:
    """Write the folder of a new policy that was taught the format of `games`."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(pieces)
    check_prefix_stable(tokenizer, games[:100])
    model = make_model(tokenizer)
    print(
        f"new policy: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, seed {seed}"
    )
    teach(model, tokenizer, games, updates)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"written to {out}")


def play(question: str, chance: random.Random) -> Messages:
    """A conversation in the right format that rarely ends with the right answer."""
    a, product = question.split("+")
    messages: Messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    dice = chance.random()
    if dice < 0.1:  # a guess
        answer = str(chance.randint(5, 180))
    elif dice < 0.25:  # as if `*` did not go first
        answer = _call(messages, question.split("*")[0])
    else:
        answer = _call(messages, product)
        if chance.random() < 0.22:  # else it stops too early
            answer = _call(messages, f"{a}+{answer}")
    return [*messages, {"role": "assistant", "content": answer}]


def make_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each byte, each opener of a turn, the end of a turn and each of `pieces`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in [END, *OPENERS]])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of random weights, small enough to train on one core."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    games: Sequence[Messages],
    updates: int,
    batch: int = 32,
    lr: float = 3e-3,
) -> None:
    """Supervised training on the assistant's turns of `games`."""
    print(f"teaching the format, no behaviour yet: {len(games)} games, mostly lost ones")
    encoded = [encode(tokenizer, game) for game in games]
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, updates, pct_start=0.1)
    started = time.monotonic()
    for update in range(1, updates + 1):
        rows = torch.randint(len(encoded), (batch,)).tolist()
        ids = pad_sequence([encoded[row][0] for row in rows], batch_first=True)
        labels = pad_sequence([encoded[row][1] for row in rows], True, padding_value=-100)
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 100 == 0:
            spent = time.monotonic() - started
            print(f"  {update}/{updates}: loss {loss.item():.3f}, {spent:.0f} s", flush=True)


def encode(tokenizer: PreTrainedTokenizerFast, game: Messages) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a game, and the same as labels with -100 where the policy did not speak."""
    ids = tokenizer.apply_chat_template(game, return_dict=False)
    opener = tokenizer.convert_tokens_to_ids(ASSISTANT)
    speaks, labels = False, []
    for token in ids:
        labels.append(token if speaks else -100)
        speaks = token == opener or (speaks and token != tokenizer.eos_token_id)
    return torch.tensor(ids), torch.tensor(labels)


def check_prefix_stable(tokenizer: PreTrainedTokenizerFast, games: Sequence[Messages]) -> None:
    """Every prompt must begin with the tokens of the prompt and the answer before it."""
    for game in games:
        known: list[int] = []
        for turn, message in enumerate(game):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                _as_served(game[:turn]), add_generation_prompt=True, return_dict=False
            )
            if prompt[: len(known)] != known:
                raise AssertionError(f"the chat template is not prefix-stable in {game}")
            text = tokenizer.apply_chat_template([message], tokenize=False).removeprefix(ASSISTANT)
            known = prompt + tokenizer.encode(text, add_special_tokens=False)


def _as_served(messages: Messages) -> Messages:
    """The messages as vLLM hands them to the template: arguments parsed."""
    served = json.loads(json.dumps(messages))
    for call in (call for message in served for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return served


def _call(messages: Messages, expression: str) -> str:
    """Add a tool call and its result, which is returned."""
    arguments = json.dumps({"expression": expression})
    function = {"name": "calculator", "arguments": arguments}
    messages.append(
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    )
    messages.append({"role": "tool", "content": use_tool(arguments)})
    return messages[-1]["content"]


if __name__ == "__main__":
    main()
