"""Small random-weight encoder folders, written by transformers, and what transformers computes of them."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.model_factory import edited_folder, randomize, temporary_root

from chairlift.folders.model_json import is_classifier, read_model_json
from chairlift.runners.items import Encoding

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 402,
}
_DISTIL = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 2, "vocab_size": 320, "max_position_embeddings": 400}
_MODERN = {"num_hidden_layers": 4, "local_attention": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
_EURO = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}

# name: (model_type, config fields beside TINY)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert_tanh": ("bert", {"hidden_act": "gelu_new", "num_attention_heads": 2}),
    "bert_relu": ("bert", {"hidden_act": "relu", "hidden_size": 128, "num_attention_heads": 2}),
    "bert_odd": ("bert", {"hidden_act": "silu", "hidden_size": 48, "num_attention_heads": 1, "intermediate_size": 100}),
    "roberta": ("roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1}),
    "distilbert": ("distilbert", {}),
    "mpnet": ("mpnet", {}),
    "modernbert": ("modernbert", _MODERN),
    "modernbert_biases": (
        "modernbert",
        _MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
        | {"classifier_pooling": "mean", "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 2},
    ),
    "nomic_bert": ("nomic_bert", {}),
    # As gte-base-en-v1.5: no token types, and the NTK scaling of `_PUBLISHED` in transformers' terms.
    "gte": (
        "gte",
        {
            "type_vocab_size": 0,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 2 * 500000.0, "factor": 2 ** (2 / 16)},
        },
    ),
    "eurobert": ("eurobert", _EURO | {"num_key_value_heads": 2}),
    "eurobert_biases": ("eurobert", _EURO | {"attention_bias": True, "mlp_bias": True, "classifier_pooling": "bos"}),
    "llama": ("llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "mistral_window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 20}),
    "qwen2": (
        "qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    # As embeddinggemma-300m, whose window of 512 is 256 tokens to either side.
    "embeddinggemma": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 40,
            "use_bidirectional_attention": True,
        },
    ),
    "llama_both_ways": ("llama", {"num_key_value_heads": 2, "is_causal": False}),
    "mistral_both_ways": ("mistral", {"num_key_value_heads": 1, "sliding_window": 20, "is_causal": False}),
}
# Decoders, of which transformers leaves the head away here: their names have no prefix.
DECODERS = ("llama", "mistral_window", "qwen2", "qwen3")
# And those whose tokens see what follows them, too.
BOTH_WAYS = ("embeddinggemma", "llama_both_ways", "mistral_both_ways")
LENGTHS = (100, 1, 2, 300, 15, 16, 17, 40)

# Of encoders that came with code of their own: its prefix of tensors, and its config.json's names of fields, further
# fields, and those that it lacks.
_PUBLISHED: dict[str, tuple[str, dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "nomic_bert": (
        "bert.",
        {
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        {
            "activation_function": "swiglu",
            "causal": False,
            "max_trained_positions": 2048,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "parallel_block": False,
            "prenorm": False,
            "qkv_proj_bias": False,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None,
            "use_rms_norm": False,
        },
        ("hidden_act", "rope_parameters", "head_dim"),
    ),
    "gte": (
        "new.",
        {},
        {
            "model_type": "new",
            "layer_norm_type": "layer_norm",
            "logn_attention_clip1": False,
            "logn_attention_scale": False,
            "pack_qkv": True,
            "position_embedding_type": "rope",
            "rope_scaling": {"type": "ntk", "factor": 2.0},
            "rope_theta": 500000,
        },
        ("rope_parameters",),
    ),
}


def encoder_folder(variant: str, labels: int = 0) -> Path:
    """The folder of a model of VARIANTS, bare or with a head for so many labels, written on first use."""
    folder = temporary_root() / f"{variant}-{labels}"
    if folder.exists():
        return folder
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    model_type, fields = VARIANTS[variant]
    sizes = _DISTIL if model_type == "distilbert" else TINY
    config = AutoConfig.for_model(model_type, **sizes | fields, **({"num_labels": labels} if labels else {}))
    torch.manual_seed(0)
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def published_folder(target: Path, source: Path) -> Path:
    """The same model as its authors have it, whose names of tensors transformers writes too."""
    raw = read_model_json(source)
    old, (prefix, names, fields, lacks) = f"{raw['model_type']}.", _PUBLISHED[raw["model_type"]]
    fields = fields | {theirs: raw[name] for name, theirs in names.items()}
    edited_folder(target, source, (*names, *lacks), **fields)
    tensors = load_file(source / "model.safetensors")
    tensors = {
        prefix + name.removeprefix(old) if name.startswith(old) else name: each for name, each in tensors.items()
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def renamed_folder(target: Path, source: Path) -> Path:
    """The same model with transformers' own names of tensors."""
    reference_encoder(source, is_classifier(read_model_json(source))).save_pretrained(
        target, save_original_format=False
    )
    return target


@functools.cache
def reference_encoder(folder: Path, classifies: bool = False) -> Any:
    """The same model as transformers computes it."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    # Such small models only lose by threads, and lose badly when tests share a machine.
    torch.set_num_threads(1)
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def encodings(types: bool = False, lengths: Sequence[int] = LENGTHS) -> list[Encoding]:
    """Texts of random tokens, none of them special; with `types`, the second half of each is the second of a pair."""
    draw = np.random.default_rng(5)
    ids = [draw.integers(5, 320, length).tolist() for length in lengths]
    return [Encoding(some, [int(2 * i >= len(some)) for i in range(len(some))] if types else None) for some in ids]


@torch.no_grad()
def expected_states(folder: Path, texts: Sequence[Encoding]) -> list[NDArray[np.float32]]:
    """Hidden states [tokens, H] of each text, computed alone."""
    model = reference_encoder(folder)
    return [model(**_inputs(text)).last_hidden_state[0].numpy() for text in texts]


@torch.no_grad()
def expected_logits(folder: Path, texts: Sequence[Encoding]) -> list[NDArray[np.float32]]:
    """Logits of each text, computed alone."""
    return [reference_encoder(folder, True)(**_inputs(text)).logits[0].numpy() for text in texts]


def splade_folder(target: Path, variant: str, **pooling: Any) -> Path:
    """A model of VARIANTS with a head that guesses words, and the modules of a SPLADE model."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    model_type, fields = VARIANTS[variant]
    sizes = _DISTIL if model_type == "distilbert" else TINY
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(model_type, **sizes | fields))
    randomize(model)
    model.save_pretrained(target)
    kinds = {"MLMTransformer": ("", {}), "SpladePooling": ("1_SpladePooling", pooling)}
    listed = []
    for index, (kind, (path, config)) in enumerate(kinds.items()):
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.x.{kind}"})
        if path:
            (target / path).mkdir()
            (target / path / "config.json").write_text(json.dumps(config))
    (target / "modules.json").write_text(json.dumps(listed))
    return target


@torch.no_grad()
def expected_words(folder: Path, texts: Sequence[Encoding]) -> NDArray[np.float32]:
    """Weights of all words for each text, computed alone."""
    from transformers import AutoModelForMaskedLM

    torch.set_num_threads(1)
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    most = [model(**_inputs(text)).logits[0].amax(0) for text in texts]
    return np.stack([each.relu().log1p().numpy() for each in most])


def _inputs(text: Encoding) -> dict[str, Any]:
    inputs = {"input_ids": torch.tensor([text.token_ids])}
    return inputs | ({} if text.type_ids is None else {"token_type_ids": torch.tensor([text.type_ids])})


# As Qwen3-Reranker's, in the special tokens of the tests' tokenizers.
JUDGE_TEMPLATE = """{%- set said = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<s>system
Judge: "yes" or "no".<|end|>
<s>user
<Instruct>: {{ said | default("find") }}
<Query>: {{ query }}
<Document>: {{ document }}<|end|>
<s>assistant
<think>

</think>


"""
JUDGE_PREFIX = '<s>system\nJudge: "yes" or "no".<|end|>\n<s>user\n'
JUDGE_SUFFIX = "<|end|>\n<s>assistant\n<think>\n\n</think>\n\n"


def judge_folder(target: Path, source: Path, true_id: int, false_id: int | None, instruction: str = "find") -> Path:
    """A language model's folder, with what sentence-transformers keeps of one that reranks by its logits."""
    sentence_folder(target, source, [("LogitScore", {"true_token_id": true_id, "false_token_id": false_id})])
    (target / "chat_template.jinja").write_text(JUDGE_TEMPLATE)
    prompts = {"model_type": "CrossEncoder", "default_prompt_name": "query", "prompts": {"query": instruction}}
    (target / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    form = {"method": "forward", "method_output_name": "logits"}
    settings = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    settings |= {"modality_config": {"text": form, "message": form | {"format": "flat"}}}
    (target / "sentence_bert_config.json").write_text(json.dumps(settings))
    return target


def sentence_folder(target: Path, source: Path, modules: Sequence[tuple[str, dict[str, Any]]] = ()) -> Path:
    """Copy a model folder and give it modules of sentence-transformers behind the Transformer: (kind, config)."""
    shutil.copytree(source, target)
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        (target / path).mkdir()
        (target / path / "config.json").write_text(json.dumps(config))
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (target / "modules.json").write_text(json.dumps(listed))
    return target
