"""Encoders whose code is in their folders alone, written out for one text."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HEAD, MIDDLE, WORDS, EXPERTS = 16, 96, 320, 4
Shapes = dict[str, tuple[int, ...]]


class Definition:
    """A kind of encoder with so many heads: its config.json, its tensors, and what it makes of a text."""

    eps = 1e-12

    def __init__(self, heads: int) -> None:
        self.heads, self.hidden = heads, heads * HEAD
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: (0.3 if len(shape) == 1 else 0.15) * torch.randn(shape, generator=generator)
            for name, shape in self.shapes().items()
        }
        for name, tensor in self.tensors.items():
            if any(f"{norm}.weight" in name for norm in ("norm", "Norm", "norm1", "norm2", "emb_ln")):
                tensor += 1

    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    def shapes(self) -> Shapes:
        raise NotImplementedError

    def states(self, ids: list[int], types: list[int]) -> Tensor:
        raise NotImplementedError

    def folder(self, target: Path) -> Path:
        target.mkdir()
        (target / "config.json").write_text(json.dumps(self.config()))
        save_file(self.tensors, target / "model.safetensors", {"format": "pt"})
        return target

    def projection(self, name: str, outs: int, ins: int, bias: bool = True) -> Shapes:
        return {f"{name}.weight": (outs, ins)} | ({f"{name}.bias": (outs,)} if bias else {})

    def norms(self, *names: str) -> Shapes:
        return {f"{name}.{part}": (self.hidden,) for name in names for part in ("weight", "bias")}

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def embedded(self, ids: list[int], types: list[int]) -> Tensor:
        words, kinds = (self.tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
        return words[ids] + kinds[types]


class JinaBert(Definition):
    """As jina-embeddings-v2-base-en."""

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "bert",
            "architectures": ["JinaBertForMaskedLM"],
            "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_hidden_layers": 2,
            "intermediate_size": MIDDLE,
            "vocab_size": WORDS,
            "type_vocab_size": 2,
            "max_position_embeddings": 512,
            "layer_norm_eps": self.eps,
            "hidden_act": "gelu",
            "feed_forward_type": "geglu",
            "position_embedding_type": "alibi",
        }

    def shapes(self) -> Shapes:
        hidden = self.hidden
        found: Shapes = {
            "embeddings.word_embeddings.weight": (WORDS, hidden),
            "embeddings.token_type_embeddings.weight": (2, hidden),
        } | self.norms("embeddings.LayerNorm")
        for prefix in ("encoder.layer.0.", "encoder.layer.1."):
            found |= self.norms(f"{prefix}attention.output.LayerNorm", f"{prefix}mlp.layernorm")
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                found |= self.projection(f"{prefix}attention.{name}", hidden, hidden)
            found |= self.projection(f"{prefix}mlp.gated_layers", 2 * MIDDLE, hidden, bias=False)
            found |= self.projection(f"{prefix}mlp.wo", hidden, MIDDLE)
        return found

    def slope(self, head: int) -> float:
        """As the authors of ALiBi have it for 4 heads and for 12."""
        if self.heads == 4:
            return 2.0 ** (-2 * (head + 1))
        return 2.0 ** -(head + 1 if head < 8 else head - 8 + 0.5)

    def states(self, ids: list[int], types: list[int]) -> Tensor:
        x = self.norm(self.embedded(ids, types), "embeddings.LayerNorm")
        place = torch.arange(len(ids))
        far = (place[:, None] - place).abs()
        for prefix in ("encoder.layer.0.", "encoder.layer.1."):
            parts = (self.linear(x, f"{prefix}attention.self.{part}") for part in ("query", "key", "value"))
            mixed = []
            for head, (q, k, v) in enumerate(zip(*(part.chunk(self.heads, -1) for part in parts), strict=True)):
                scores = q @ k.T / math.sqrt(HEAD) - self.slope(head) * far
                mixed.append(scores.softmax(-1) @ v)
            added = self.linear(torch.cat(mixed, -1), f"{prefix}attention.output.dense")
            x = self.norm(x + added, f"{prefix}attention.output.LayerNorm")
            active, gate = self.linear(x, f"{prefix}mlp.gated_layers").chunk(2, -1)
            x = self.norm(x + self.linear(functional.gelu(active) * gate, f"{prefix}mlp.wo"), f"{prefix}mlp.layernorm")
        return x


class NomicExperts(Definition):
    """As nomic-embed-text-v2-moe: every second layer has experts."""

    eps = 1e-5

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "activation_function": "gelu",
            "expert_choice_router": False,
            "layer_norm_epsilon": self.eps,
            "mlp_fc1_bias": True,
            "mlp_fc2_bias": True,
            "moe_every_n_layers": 2,
            "moe_normalize_expert_weights": False,
            "moe_top_k": 2,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_inner": MIDDLE,
            "n_layer": 4,
            "n_positions": 512,
            "num_experts": EXPERTS,
            "num_shared_experts": 0,
            "prenorm": False,
            "qkv_proj_bias": True,
            "rotary_emb_base": 10000.0,
            "rotary_emb_fraction": 1.0,
            "type_vocab_size": 2,
            "vocab_size": WORDS,
        }

    def shapes(self) -> Shapes:
        hidden = self.hidden
        found: Shapes = {
            "embeddings.word_embeddings.weight": (WORDS, hidden),
            "embeddings.token_type_embeddings.weight": (2, hidden),
        } | self.norms("emb_ln")
        for layer in range(4):
            prefix = f"encoder.layers.{layer}."
            found |= self.norms(f"{prefix}norm1", f"{prefix}norm2")
            found |= self.projection(f"{prefix}attn.Wqkv", 3 * hidden, hidden)
            found |= self.projection(f"{prefix}attn.out_proj", hidden, hidden)
            if layer % 2:
                both = {f"{prefix}mlp.experts.mlp.{name}": (EXPERTS * MIDDLE, hidden) for name in ("w1", "w2")}
                found |= both | {f"{prefix}mlp.experts.bias": (hidden,)}
                found |= self.projection(f"{prefix}mlp.router.layer", EXPERTS, hidden, bias=False)
            else:
                found |= self.projection(f"{prefix}mlp.fc1", MIDDLE, hidden)
                found |= self.projection(f"{prefix}mlp.fc2", hidden, MIDDLE)
        return found

    def rotated(self, x: Tensor) -> Tensor:
        """x [tokens, HEAD]: the halves of a head turn together."""
        half = HEAD // 2
        angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(half) / half))
        one, other = x.chunk(2, -1)
        return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), dim=-1)

    def mixed_experts(self, x: Tensor, prefix: str) -> Tensor:
        shares = self.linear(x, f"{prefix}router.layer").softmax(-1)
        w1, w2 = (self.tensors[f"{prefix}experts.mlp.{name}"].view(EXPERTS, MIDDLE, -1) for name in ("w1", "w2"))
        rows = []
        for token, share in zip(x, shares, strict=True):
            best = share.topk(2)
            made = (functional.gelu(w1[expert] @ token) @ w2[expert] for expert in best.indices)
            rows.append(sum(count * each for count, each in zip(best.values, made, strict=True)))
        return torch.stack(rows) + self.tensors[f"{prefix}experts.bias"]

    def states(self, ids: list[int], types: list[int]) -> Tensor:
        x = self.norm(self.embedded(ids, types), "emb_ln")
        for layer in range(4):
            prefix = f"encoder.layers.{layer}."
            parts = self.linear(x, f"{prefix}attn.Wqkv").chunk(3, -1)
            mixed = []
            for q, k, v in zip(*(part.chunk(self.heads, -1) for part in parts), strict=True):
                scores = self.rotated(q) @ self.rotated(k).T / math.sqrt(HEAD)
                mixed.append(scores.softmax(-1) @ v)
            x = self.norm(x + self.linear(torch.cat(mixed, -1), f"{prefix}attn.out_proj"), f"{prefix}norm1")
            if layer % 2:
                made = self.mixed_experts(x, f"{prefix}mlp.")
            else:
                made = self.linear(functional.gelu(self.linear(x, f"{prefix}mlp.fc1")), f"{prefix}mlp.fc2")
            x = self.norm(x + made, f"{prefix}norm2")
        return x
