"""Writes docs/models.md from the rows of the families: python scripts/models_doc.py

A test holds the file against the rows, so that a family can't be added without being told of.
"""

from pathlib import Path

from chairlift.bench.raw_results import layout
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.decoder_family import DecoderFamily
from chairlift.folders.delta_nets import parse_delta_nets, parse_delta_nets_by_heads
from chairlift.folders.encoder_families import FAMILIES as ENCODERS
from chairlift.folders.layer_rules import rope_per_type, rope_scaled_without_window
from chairlift.folders.mamba_mixers import parse_mamba_mixers
from chairlift.folders.multimodal import MULTIMODAL
from chairlift.folders.short_convolutions import parse_short_convolutions
from chairlift.folders.transformers_config import REFUSED as REFUSED_FAMILIES
from chairlift.gguf.architectures import ARCHITECTURES, WITH_CHANGES, WITH_EXPERTS
from chairlift.gguf.encoder_architectures import ENCODERS as GGUF_ENCODERS
from chairlift.gguf.hybrid_config import HYBRIDS

PATH = Path(__file__).parents[1] / "docs" / "models.md"
# Which models have that `model_type` in their config.json.
KNOWN = {
    "llama": "Llama 2, 3, 3.1, 3.2 (text), TinyLlama, SmolLM 1 and 2, Falcon 3, Yi, DeepSeek R1 distilled into Llama",
    "mistral": "Mistral 7B, Nemo, Codestral, Small (text)",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3 3B, 8B and 14B (text)",
    "qwen2": "Qwen 1.5, 2 and 2.5, QwQ, DeepSeek R1 distilled into Qwen",
    "qwen3": "Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    "gemma3_text": "Gemma 3 270M and 1B, EmbeddingGemma",
    "gemma2": "Gemma 2",
    "gemma": "Gemma 1, CodeGemma",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "granite": "Granite 3",
    "smollm3": "SmolLM 3",
    "phi3": "Phi 3, 3.5 mini, 4 and 4 mini",
    "glm": "GLM 4 9B",
    "glm4": "GLM 4 of April 2025",
    "exaone4": "EXAONE 4",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "seed_oss": "Seed-OSS",
    "helium": "Helium 1",
    "cwm": "Code World Model",
    "olmo": "OLMo 1",
    "stablelm": "StableLM 3B, 1.6B, Zephyr 3B",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen 1.5 and 2 with experts",
    "qwen3_moe": "Qwen 3 with experts",
    "olmoe": "OLMoE",
    "flex_olmo": "FlexOlmo",
    "granitemoe": "Granite 3 with experts",
    "ernie4_5_moe": "ERNIE 4.5 with experts",
    "glm4_moe": "GLM 4.5",
    "dots1": "dots.llm1",
    "deepseek_v2": "DeepSeek V2 and its Lite and Coder",
    "deepseek_v3": "DeepSeek V3 and R1, in bfloat16 or FP8, which is unpacked",
    "glm4_moe_lite": "GLM 4.7 Flash",
    "youtu": "Youtu-LLM",
    "minicpm3": "MiniCPM 3",
    "starcoder2": "StarCoder 2",
    "cohere": "Command R, Aya 23 and Expanse 8B",
    "cohere2": "Command R7B, Command A",
    "gpt_neox": "Pythia, GPT-NeoX 20B, Dolly 2",
    "falcon": "Falcon 7B, 40B, 11B, RW 1B and 7B",
    "bloom": "BLOOM, BLOOMZ",
    "mpt": "MPT 7B and 30B (StoryWriter, whose queries are clipped, is refused)",
    "opt": "OPT, but the one of 350m",
    "gpt2": "GPT-2, DistilGPT2",
    "gpt_bigcode": "SantaCoder, StarCoder 1",
    "lfm2": "LFM2 350M to 2.6B",
    "lfm2_moe": "LFM2 with experts",
    "qwen3_5_text": "Qwen 3.5 without its part for images",
    "qwen3_5_moe_text": "Qwen 3.5 with experts, without its part for images",
    "qwen3_next": "Qwen3-Next",
    "granitemoehybrid": "Granite 4 and 4 H",
    "gpt_oss": "gpt-oss 20B and 120B, in bfloat16 or MXFP4, which is unpacked",
    "bert": "BERT, all-MiniLM, BGE, E5, GTE, mxbai, SPLADE, jina-embeddings-v2 (those that norm queries and keys, such "
    "as base-code, are refused)",
    "roberta": "RoBERTa, all-distilroberta",
    "xlm-roberta": "XLM-R, multilingual E5, BGE-M3 and its reranker",
    "camembert": "CamemBERT",
    "distilbert": "DistilBERT",
    "mpnet": "all-mpnet, multi-qa-mpnet",
    "modernbert": "ModernBERT, gte-modernbert, Ettin and its rerankers",
    "nomic_bert": "nomic-embed-text v1, v1.5 and v2 (experts), arctic-embed-m-long, CodeRankEmbed",
    "gte": "arctic-embed-m-v2.0, GTE as transformers has it",
    "new": "gte-en-v1.5, gte-multilingual and its reranker",
    "eurobert": "EuroBERT",
}
_NOT_READ = 'not read yet; `quantization = "int8"` or "int4" rounds a plain folder'
# Through transformers, as the tests have them.
FOREIGN = {
    "phi": "Phi 1 and 2",
    "stablelm": "StableLM 2 12B, which norms queries and keys (others are native)",
    "cohere": "Command R+, which norms queries and keys (others are native)",
    "nemotron": "Nemotron 4, Minitron",
    "persimmon": "Persimmon",
    "arcee": "AFM",
    "apertus": "Apertus",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "nanochat": "nanochat",
    "phimoe": "Phi 3.5 with experts",
    "minimax_m2": "MiniMax M2, in FP8 as its own repository has it, too",
    "longcat_flash": "LongCat Flash",
    "hunyuan_v1_moe": "Hunyuan with experts",
    "solar_open": "Solar Open",
    "biogpt": "BioGPT",
    "gemma3n_text": "Gemma 3n without its parts for images and sound",
    "gemma4_text": "Gemma 4 without its parts for images and sound",
    "vaultgemma": "VaultGemma",
    "lfm3": "LFM3 (states)",
    "olmo_hybrid": "OLMo Hybrid (states)",
    "bamba": "Bamba (states)",
    "falcon_h1": "Falcon-H1 (states)",
    "nemotron_h": "Nemotron-H, Nemotron 3 (states)",
    "jamba": "Jamba (states, taken up token by token)",
    "mamba2": "Mamba 2, Codestral Mamba (states alone)",
    "gptj": "GPT-J 6B",
    "codegen": "CodeGen",
    "afmoe": "Arcee Trinity",
    "exaone_moe": "K-EXAONE",
    "hy_v3": "Hunyuan 3",
    "cohere2_moe": "Cohere's with experts",
    "jais2": "Jais 2",
    "laguna": "Laguna",
    "jetmoe": "JetMoE",
    "mellum": "Mellum with experts",
    "kolibri1": "Kolibri 1",
    "falcon_mamba": "Falcon Mamba (states alone, taken up token by token)",
}
# Those that read images too, of which the part for texts is served, through transformers as well.
SEEING = {
    "gemma4": "Gemma 4; its parts for images and sound are left out",
    "qwen3_vl_moe": "Qwen3-VL with experts; its part for images is left out",
}
# The same natively.
KNOWN_MULTIMODAL = {
    "gemma3": "Gemma 3 4B to 27B",
    "mistral3": "Mistral Small 3.1 and 3.2, Ministral 3",
    "qwen2_vl": "Qwen2-VL, QVQ",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL 2B to 32B",
    "qwen3_5": "Qwen 3.5",
    "qwen3_5_moe": "Qwen 3.5 with experts",
    "lfm2_vl": "LFM2-VL",
    "glm4v": "GLM-4.1V, GLM-4.6V Flash",
    "llava": "LLaVA 1.5, Pixtral",
    "llava_next": "LLaVA 1.6, Granite Vision",
    "llava_onevision": "LLaVA-OneVision",
    "internvl": "InternVL 3 as transformers has it",
    "aya_vision": "Aya Vision",
    "cohere2_vision": "Command A Vision",
    "idefics3": "Idefics 3",
    "smolvlm": "SmolVLM",
    "voxtral": "Voxtral",
    "qwen2_audio": "Qwen2-Audio",
}
REFUSED = {f"{what} ({', '.join(models.values())})": why for what, why, models in REFUSED_FAMILIES} | {
    "images and sound": "only texts go in",
    "quantized folders of other layouts (bitsandbytes, HQQ, NVFP4)": _NOT_READ,
    "quantized folders with several experts in a tensor (but gpt-oss's MXFP4, and Granite's in 8 bits)": _NOT_READ,
    "GGUF files of other architectures": "not read yet",
}

_TEXT = """# Models

`chairlift check NAME` says of any folder or [name of the Hub](guides/serving.md#models-of-the-hub) whether it is
served, and in what memory. This page is written by `scripts/models_doc.py` from the code's own tables, and a test holds
the two together.

## Models that write

All of them under all four strategies, with prefix cache, chunks and preemption; in float32, bfloat16 or with
`quantization = "int8"` or `"int4"`, over a KV cache of that type or of `int8`; by native kernels, a whole step in one
call from AVX2 on. Folders of float16 are computed in float32, over weights that stay float16. All but those with
[states](#any-other-family-through-transformers) can embed, too (`kind = "encoder"`). Each is held against transformers
by tests: logits, greedy tokens alone, in company, in chunks, after prefix hits and a preemption.

Folders quantized by **GPTQ** (2, 4 and 8 bits, ordered or not), **AWQ**, **compressed-tensors** (4 and 8 bits, fp8) and
in **FP8** (blocks or not) are [unpacked as they are read](guides/serving.md#quantized-folders), and so are
**GGUF** files of {architectures}, and of
{with_experts} with experts ([formats](guides/serving.md#gguf-files)).

In the last column, *windows* are sliding-window attention, *neighbours rotated* is interleaved RoPE, *layers without
rotation* have no RoPE, *experts* are a mixture of experts, and *multipliers* are factors on embeddings, scores,
residuals and logits.

{decoders}

Of these **models that read images or sound, too**, the part for texts is computed by the same kernels; the others are
left in the files, and a request with images is refused.

{multimodal}

## Any other family, through transformers

With `pip install 'chairlift[transformers]'` (or `implementation = "transformers"` for a native family) transformers'
modules compute the layers, our products and our attention over the paged cache take the place of theirs, and all of
the above holds: strategies, prefix cache, chunks, preemption, int8 and int4. It costs Python for each layer and step.
A model is checked as it is loaded: what it computes in parts and in company must be what it computes alone, and what
attention there is must be known; or else it is refused. Quantized folders are unpacked as native families' are. Where
keys and values are made from a latent (LongCat), they themselves are cached, which takes many times the memory that
native families with [latent attention](decisions/035-latent-attention.md) take. These are held against transformers by
tests; others may do. Of these families **GGUF** files of
{with_states} are read.

**Layers with states** (linear attention, Mamba, short convolutions) remember by a state instead of keys and values. A
prefix is found where a [snapshot](guides/serving.md#models-with-states) of it was kept: at prompts' and answers' ends
and where prefixes part, at any token. Tests hold these models' texts from snapshots to those of transformers, too.
Those that are not native need transformers 5.21 or newer, and on a GPU all of them do.

{foreign}

## Models that embed, classify or rerank

In batches of texts of any length without padding; in float32, bfloat16, int8 or int4. Also out of **GGUF** files of
{gguf_encoders} ([formats](guides/serving.md#gguf-files)).

{encoders}

Decoders that are native do the same where [their folder says so](guides/items.md): Qwen3-Embedding, e5-mistral,
Qwen3-Reranker, zerank-2. Their tokens see what comes before them, or where config.json says so (`is_causal`, and of
Gemma 3 `use_bidirectional_attention`) all of a text: EmbeddingGemma, gte-Qwen2.

ONNX files and Python classes are [served too](guides/functions-and-onnx.md), whatever is in them.

## What is refused

By name: from config.json before any weights are read, or through transformers by the checks above.

{refused}
"""


def text() -> str:
    """The whole page."""
    decoders = [["`model_type`", "models", "unlike Llama"]]
    decoders += [[f"`{name}`", KNOWN[name], _unlike_llama(row)] for name, row in DECODERS.items()]
    encoders = [["`model_type`", "models"], *([f"`{name}`", KNOWN[name]] for name in ENCODERS)]
    foreign = [["`model_type`", "models"], *([f"`{name}`", known] for name, known in (FOREIGN | SEEING).items())]
    multimodal = [["`model_type`", "models"], *([f"`{name}`", KNOWN_MULTIMODAL[name]] for name in MULTIMODAL)]
    refused = [["models", "why"], *map(list, REFUSED.items())]
    native = [name for name in WITH_CHANGES if HYBRIDS[name].model_type in DECODERS]
    return _TEXT.format(
        architectures=", ".join(f"`{name}`" for name in (*ARCHITECTURES, *native)),
        gguf_encoders=", ".join(f"`{name}`" for name in GGUF_ENCODERS),
        with_experts=", ".join(f"`{name}`" for name in WITH_EXPERTS),
        with_states=", ".join(f"`{name}`" for name in WITH_CHANGES if name not in native),
        decoders=layout(decoders),
        encoders=layout(encoders),
        refused=layout(refused),
        foreign=layout(foreign),
        multimodal=layout(multimodal),
    )


def _unlike_llama(row: DecoderFamily) -> str:
    """What of a family's row is not Llama's."""
    plain = DecoderFamily()
    found = {
        "LayerNorms": row.norm_kind != "rms",
        "norms after attention and MLP": row.norms.attention_pre is None,
        "norms before and after": row.norms.attention_pre is not None and row.norms.attention_post is not None,
        "norms of queries and keys": row.qk_norm is not None,
        "windows": row.windows is not plain.windows,
        "layers without rotation": row.rotated is not plain.rotated and row.slopes is None,
        "a rotation for each kind of layer": row.rope in (rope_per_type, rope_scaled_without_window),
        "queries that grow with positions": row.grows,
        "neighbours rotated": row.neighbours,
        "part of a head rotated": row.rotary_share is not None,
        "joint projections": len(row.names.qkv) == 1 or (row.gated and len(row.names.gate_up) == 1),
        "no gate in MLPs": not row.gated,
        "attention and MLP side by side": row.parallel is not False,
        "learned positions": row.names.positions is not None,
        "slopes in place of positions": row.slopes is not None,
        "a norm of embeddings": row.names.embedding_norm is not None,
        "GELU": row.activation[1].startswith("gelu"),
        "multipliers": row.multipliers,
        "scaled embeddings": row.scaled_embedding,
        "latent attention": row.latent,
        "short convolutions (states)": row.mixers is parse_short_convolutions,
        "gated delta rule (states)": row.mixers in (parse_delta_nets, parse_delta_nets_by_heads),
        "Mamba 2 (states)": row.mixers is parse_mamba_mixers,
        "gated attention": row.gated_attention,
        "experts": row.experts is not None,
        "attention sinks": row.sinks,
        "capped scores and logits": row.caps is not None,
    }
    return ", ".join(name for name, there in found.items() if there) or "-"


if __name__ == "__main__":
    PATH.write_text(text())
