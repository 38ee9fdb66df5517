"""Models with random weights, in the shapes of those that people have: python benchmarks/shapes.py FOLDER
--tokenizer FOLDER [--only NAME ...]

Speed does not depend on the weights. The tokenizer is another model's; prompts of the benchmarks are token ids.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
# name: (model_type, config). OLMoE's shape in small: 0.9 billion weights, of which a token uses 0.2.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe-1b": (
        "olmoe",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "intermediate_size": 320,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-270m": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    # Latent attention: Youtu-LLM's heads, half of them, in half its width.
    "youtu-0.3b": (
        "youtu",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    # With states: short convolutions, and linear attention.
    "lfm2-350m": (
        "lfm2",
        {
            "vocab_size": 65536,
            "hidden_size": 1024,
            "intermediate_size": 4608,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": [
                *("conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv", "full_attention"),
                *("conv", "full_attention", "conv", "full_attention", "conv", "full_attention", "conv"),
            ],
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-0.8b": (
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    # SmolLM 3's proportions in a tenth of its size.
    "smollm3-300m": (
        "smollm3",
        {
            "vocab_size": 128256,
            "hidden_size": 768,
            "intermediate_size": 4096,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="a model's, for its tokenizer")
    args = parser.parse_args()
    for name in args.only:
        make(name, args.folder / name, args.tokenizer)


def make(name: str, folder: Path, tokenizer: Path) -> None:
    """Write one model, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields, **_SPECIAL, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} million weights")


if __name__ == "__main__":
    main()
