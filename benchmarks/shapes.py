"""Models with random weights, in the shapes of those that people have: python benchmarks/shapes.py FOLDER
[--only NAME ...] [--tokenizer FOLDER]

Speed does not depend on the weights. The tokenizer is made, of words that are one token each and of all bytes, or is
another model's: the prompts of most benchmarks are token ids.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from shape_tokenizers import write_pairs, write_words

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
# name: (model_type, config). OLMoE's shape in small: 0.9 billion weights, of which a token uses 0.2.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # SmolLM2's of 135 million.
    "llama-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
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
    # Granite 4 H's smallest: four layers of attention among 28 of Mamba 2.
    "granite4-350m": (
        "granitemoehybrid",
        {
            "vocab_size": 100352,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_hidden_layers": 32,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layer_types": [
                "full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)
            ],
            "mamba_n_heads": 48,
            "mamba_d_state": 128,
            "max_position_embeddings": 32768,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.246,
            "logits_scaling": 3.0,
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


# An embedder, with the files of sentence-transformers that say what to do with its states.
EMBEDDER = "all-MiniLM-L6-v2"
_EMBEDDER_FIELDS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
_POOLING = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    names = [*SHAPES, EMBEDDER]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a model's, for its tokenizer")
    args = parser.parse_args()
    for name in args.only:
        if name == EMBEDDER:
            make_embedder(args.folder / name)
        else:
            make(name, args.folder / name, args.tokenizer)


def make(name: str, folder: Path, tokenizer: Path | None) -> None:
    """Write one model, in bfloat16, with a copy of the tokenizer if one is given."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields, **_SPECIAL, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if tokenizer is None:
        write_pairs(folder)
    else:
        for file in (*tokenizer.glob("*token*.json"), *tokenizer.glob("chat_template.jinja")):
            shutil.copy(file, folder)
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} million weights")


def make_embedder(folder: Path) -> None:
    """Write the embedder, in float32."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**_EMBEDDER_FIELDS), add_pooling_layer=False).save_pretrained(folder)
    write_words(folder, _EMBEDDER_FIELDS["vocab_size"])
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(steps)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    print(f"{folder}: an embedder")


if __name__ == "__main__":
    main()
