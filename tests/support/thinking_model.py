"""The demo model with tokens for the beginning and the end of its reasoning, which it knows nothing of."""

import json
import shutil
from pathlib import Path

from chairlift.demo import demo_path

OPENS, CLOSES = "<think>", "</think>"
# As Qwen's templates have it: reasoning is opened where it is wanted, and left out of earlier turns.
TEMPLATE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if tools %}{{ '<tools>' + tools | tojson + '</tools><tool_call>{"name": , "arguments": }</tool_call>' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"""


def thinking_folder(target: Path) -> Path:
    """Write the model; the markers take the places of the last two words of its vocabulary."""
    shutil.copytree(demo_path(), target)
    path = target / "tokenizer.json"
    made = json.loads(path.read_text())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    for marker in (OPENS, CLOSES):
        word, number = max(vocab.items(), key=lambda pair: int(pair[1]))
        del vocab[word]
        merges[:] = [pair for pair in merges if "".join(pair if isinstance(pair, list) else pair.split()) != word]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        made["added_tokens"].append({"id": number, "content": marker, **flags})
    path.write_text(json.dumps(made))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target
