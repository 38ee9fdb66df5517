"""The one parametric encoder: its weights out of a folder, and the small layers behind it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.folders.alibi import slopes
from chairlift.folders.sentence_files import Dense, LayerNorm
from chairlift.ops.activation import ACTIVATIONS, activate
from chairlift.ops.encoder import EncoderLayer, EncoderWeights, Norm, Projection
from chairlift.runners.encoder.config import BUCKET_DISTANCE, BUCKETS, EncoderConfig
from chairlift.runners.weights import Weights

# That of sentence-transformers' LayerNorm, whose config.json has none.
_LAYER_NORM_EPS = 1e-5
# A quarter of a gigabyte. Those that follow from slopes are bounded by no table in the files.
_MOST_BIASES = 2**26


@dataclass(frozen=True, slots=True)
class Projected:
    """One small layer behind the encoder, in float32: projection, activation, norm, as far as it has them."""

    projection: Projection | None
    activation: str | None
    norm: Norm | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, in] -> [S, out]."""
        if self.projection is not None:
            x = F.linear(x, self.projection.weight, self.projection.bias)
        if self.activation is not None:
            x = activate(x, self.activation)
        return x if self.norm is None else F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, self.eps)


class EncoderReader:
    """Takes an encoder's tensors out of a folder. Raises UnsupportedModel naming a missing or misshapen one."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        self._config, self._weights = config, weights
        family = config.family
        self._prefix = next((each for each in family.prefixes if f"{each}{family.words}.weight" in weights), "")
        # The first layer tells who named the tensors. config.json does not: transformers may write either names.
        if family.renamed and f"{self._prefix}{family.layer.format(0)}{family.out}.weight" not in weights:
            family = replace(family, **family.renamed)
        self._family = family

    def read(self, max_tokens: int) -> EncoderWeights:
        """Return the encoder for texts of up to `max_tokens`. Raises UnsupportedModel if it has unknown parts."""
        config, family = self._config, self._family
        types = family.types if config.type_vocab_size else None
        read = EncoderWeights(
            words=self._table(family.words, config.vocab_size),
            positions=self._table(family.positions, config.max_positions) if family.positions else None,
            types=self._table(types, config.type_vocab_size) if types else None,
            first_position=config.first_position,
            embedding_norm=self._norm(f"{self._prefix}{family.embedding_norm}") if family.embedding_norm else None,
            layers=self._layers(max_tokens),
            final_norm=self._norm(f"{self._prefix}{family.final_norm}") if family.final_norm else None,
            bias=self._relative_bias(max_tokens),
            activation=config.activation,
            gated=family.gated,
            pre_norm=family.pre_norm,
            rms=family.rms,
            eps=config.eps,
            num_heads=config.num_heads,
            experts_chosen=1 if config.experts is None else config.experts.chosen,
        )
        # What has another beginning belongs to a head for some other task.
        parts = {name.split(".", 1)[0] for name in (family.words, family.layer, family.final_norm or family.words)}
        self._weights.refuse_unused([f"{self._prefix}{part}." for part in parts])
        return read

    def read_head(self, num_labels: int) -> list[Projected]:
        """Return the classification head."""
        config, hidden = self._config, self._config.hidden_size
        stages = []
        for index, stage in enumerate(self._family.head):
            last = index == len(self._family.head) - 1
            # BERT's pooler is part of the encoder, by name.
            name = stage.dense if f"{stage.dense}.weight" in self._weights else self._prefix + stage.dense
            bias = last or config.head_bias
            activation = stage.activation
            if activation == "classifier_activation":
                activation = ACTIVATIONS.get(str(config.raw.get(activation, "gelu")))
                if activation is None:
                    raise UnsupportedModel(
                        f"classifier_activation {config.raw['classifier_activation']!r} is not supported; "
                        f"these are: {', '.join(ACTIVATIONS)}"
                    )
            projection = self._projection((name,), num_labels if last else hidden, hidden, bias)
            norm = self._norm(stage.norm) if stage.norm else None
            stages.append(_projected(projection, activation, norm, config.eps))
        return stages

    def read_mask_head(self) -> list[Projected]:
        """Return the head that gives each token a number for every word. Raises UnsupportedModel if there is none."""
        config, head = self._config, self._family.mask_head
        if head is None:
            name = config.raw.get("model_type")
            raise UnsupportedModel(f"SPLADE with model_type {name!r} is not supported")
        hidden, words = config.hidden_size, config.vocab_size
        activation = config.activation if head.activation is None else ACTIVATIONS[head.activation]
        dense = _projected(
            self._projection((head.dense,), hidden, hidden, True), activation, self._norm(head.norm), config.eps
        )
        own = f"{head.projector}.weight"
        table = self._weights.take([own], [(words, hidden)]) if own in self._weights else None
        if table is None:
            table = self._table(self._family.words, words)
        bias = self._weights.take([head.bias], [(words,)])
        return [dense, _projected(Projection(table, bias), None, None, config.eps)]

    def _table(self, name: str, rows: int) -> Tensor:
        return self._weights.take([f"{self._prefix}{name}.weight"], [(rows, self._config.hidden_size)])

    def _norm(self, name: str) -> Norm:
        # Files of the first BERTs keep TensorFlow's names.
        old = f"{name}.gamma" in self._weights
        shape = (self._config.hidden_size,)
        weight = self._weights.take([f"{name}.{'gamma' if old else 'weight'}"], [shape])
        if not self._config.norm_bias:
            return Norm(weight, None)
        return Norm(weight, self._weights.take([f"{name}.{'beta' if old else 'bias'}"], [shape]))

    def _projection(self, names: Sequence[str], outs: int, ins: int, bias: bool) -> Projection:
        share = outs // len(names)
        weight = self._weights.take([f"{name}.weight" for name in names], [(share, ins)] * len(names))
        if not bias:
            return Projection(weight, None)
        return Projection(weight, self._weights.take([f"{name}.bias" for name in names], [(share,)] * len(names)))

    def _layers(self, max_tokens: int) -> list[EncoderLayer]:
        # Layers of one window rotate alike.
        tables: dict[int | None, Tensor] = {}
        layers = []
        for index, (window, rope) in enumerate(zip(self._config.windows, self._config.ropes, strict=True)):
            cos_sin = None
            if rope is not None:
                if window not in tables:
                    tables[window] = rope.table(self._config.head_dim, max_tokens).to(self._weights.device)
                cos_sin = tables[window]
            layers.append(self._layer(index, window, cos_sin))
        return layers

    def _layer(self, index: int, window: int | None, cos_sin: Tensor | None) -> EncoderLayer:
        config, family = self._config, self._family
        prefix = self._prefix + family.layer.format(index)
        hidden, middle = config.hidden_size, config.intermediate_size
        norm = prefix + family.attention_norm
        # ModernBERT's first layer follows the embeddings' norm at once.
        bare = family.pre_norm and family.embedding_norm and index == 0 and f"{norm}.weight" not in self._weights
        attention_norm, qkv = None if bare else self._norm(norm), self._qkv(prefix)
        out = self._projection([prefix + family.out], hidden, hidden, config.attention_bias)
        experts, router = config.experts, None
        if experts is not None and index % experts.every == 1:
            router, up, down = self._experts(prefix, experts.num_experts)
        else:
            up = self._up(prefix)
            down = self._projection([prefix + family.down], hidden, middle, config.mlp_bias)
        return EncoderLayer(
            attention_norm=attention_norm,
            qkv=qkv,
            out=out,
            mlp_norm=self._norm(prefix + family.mlp_norm),
            up=up,
            down=down,
            window=window,
            cos_sin=cos_sin,
            router=router,
        )

    def _experts(self, prefix: str, count: int) -> tuple[Tensor, Projection, Projection]:
        """A layer's router, and its experts' weights as `EncoderLayer` has them."""
        hidden, middle, take = self._config.hidden_size, self._config.intermediate_size, self._weights.take
        assert self._family.experts is not None
        router, first, second, bias = (prefix + name for name in self._family.experts)
        # Both lie in the files as the first does.
        shape = (count * middle, hidden)
        up, turned = (take([name], [shape]) for name in (first, second))
        down = turned.view(count, middle, hidden).transpose(1, 2).reshape(count * hidden, middle)
        chooser = take([router], [(count, hidden)], torch.float32)
        return chooser, Projection(up, None), Projection(down, take([bias], [(hidden,)]))

    def _qkv(self, prefix: str) -> Projection:
        config, hidden, bias = self._config, self._config.hidden_size, self._config.attention_bias
        names = [prefix + name for name in self._family.qkv]
        if config.num_kv_heads == config.num_heads:
            return self._projection(names, 3 * hidden, hidden, bias)
        rows = config.num_kv_heads * config.head_dim
        sizes = zip(names, (hidden, rows, rows), strict=True)
        parts = [self._projection([name], outs, hidden, bias) for name, outs in sizes]
        # Here each head has keys and values of its own: those that its group shares.
        parts[1:] = [self._repeated(part) for part in parts[1:]]
        biases = [part.bias for part in parts if part.bias is not None]
        return Projection(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)

    def _repeated(self, shared: Projection) -> Projection:
        times, size = self._config.num_heads // self._config.num_kv_heads, self._config.head_dim

        def repeat(rows: Tensor) -> Tensor:
            return rows.view(-1, size, *rows.shape[1:]).repeat_interleave(times, 0).flatten(0, 1)

        return Projection(repeat(shared.weight), None if shared.bias is None else repeat(shared.bias))

    def _up(self, prefix: str) -> Projection:
        """A layer's first projection of its MLP, a gated one with what is activated before what it is multiplied by."""
        config, family, middle = self._config, self._family, self._config.intermediate_size
        names, bias = [prefix + name for name in family.up], config.mlp_bias and family.up_bias
        up = self._projection(names, (1 + family.gated) * middle, config.hidden_size, bias)
        if not family.gate_last:
            return up
        return Projection(up.weight.roll(middle, 0), None if up.bias is None else up.bias.roll(middle))

    def _relative_bias(self, max_tokens: int) -> Tensor | None:
        """The bias of each head for each distance, [heads, 2 * max_tokens - 1] float32."""
        name, heads = self._family.relative_bias, self._config.num_heads
        if self._family.slopes and 2 * heads * max_tokens > _MOST_BIASES:
            raise UnsupportedModel(
                f"max_position_embeddings is too large: {heads} heads have {_MOST_BIASES} biases at most, which is "
                f"enough for {_MOST_BIASES // (2 * heads)} tokens, not for {max_tokens}"
            )
        distance = torch.arange(1 - max_tokens, max_tokens)
        if self._family.slopes:
            return (-torch.tensor(slopes(heads)).unsqueeze(1) * distance.abs()).to(self._weights.device)
        if name is None:
            return None
        table = self._weights.take([self._prefix + name], [(BUCKETS, heads)])
        return table.float()[_bucket(distance).to(table.device)].T.contiguous()


def read_stage(stage: Dense | LayerNorm, device: torch.device) -> Projected:
    """Read a Dense or LayerNorm module of sentence-transformers. Raises UnsupportedModel."""
    with Weights(stage.folder, torch.float32, device) as weights:
        # A GGUF file has those of all modules, and of the model.
        at = f"{stage.folder.name}." if f"{stage.folder.name}.linear.weight" in weights else ""
        if isinstance(stage, LayerNorm):
            weight, bias = (weights.take([f"norm.{name}"], [(stage.ins,)]) for name in ("weight", "bias"))
            read = Projected(None, None, Norm(weight, bias), _LAYER_NORM_EPS)
        else:
            weight = weights.take([f"{at}linear.weight"], [(stage.outs, stage.ins)])
            added = weights.take(["linear.bias"], [(stage.outs,)]) if stage.bias else None
            read = Projected(Projection(weight, added), stage.activation, None, 0.0)
        weights.refuse_unused([at])
    return read


def _projected(projection: Projection, activation: str | None, norm: Norm | None, eps: float) -> Projected:
    """The same in float32."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.float()

    projection = Projection(projection.weight.float(), wide(projection.bias))
    return Projected(projection, activation, norm and Norm(norm.weight.float(), wide(norm.bias)), eps)


def _bucket(distance: Tensor) -> Tensor:
    """MPNet's bucket of each distance key - query: half of them for each direction, and half of those exact (T5)."""
    half = BUCKETS // 2
    exact = half // 2
    size = distance.abs()
    far = exact + (size.float().clamp(min=1) / exact).log() / math.log(BUCKET_DISTANCE / exact) * (half - exact)
    return torch.where(size < exact, size, far.long().clamp(max=half - 1)) + half * (distance > 0)
