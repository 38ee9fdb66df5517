"""Layers of transformers' modules that remember by a state: each sequence goes through its own.

transformers' own caches have such states by layer (`LinearAttentionLayer`). Its modules ask them for what was before,
and tell them what is now. Here a module gets such a cache for the sequences that it computes, and no others.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from chairlift.errors import UnsupportedModel
from chairlift.ops.base import StateSpans
from chairlift.ops.contract import Ops
from chairlift.runners.decoder.recurrent_states import RecurrentStates, StateShape
from chairlift.runners.decoder.transformers_mixers import shortened
from chairlift.runners.decoder.transformers_recurrence import SpannedFunctions
from chairlift.runners.decoder.wide_convolutions import WideConvolutions

log = logging.getLogger(__name__)

Way = Literal["kernels", "pieces", "tokens"]
_KINDS = ("conv", "recurrent")
# Of a text of random rows by which a layer is tried: how many, and where it is cut.
_ROWS, _CUT = 6, 4
# By how much what comes out may differ, as a share of the largest: in float32, and where numbers have fewer bits.
_SAME, _ALIKE = 1e-3, 5e-2
# Says nothing of what a layer with a state computes; `cu_seq_lens` and the like are not given here.
_MASK = "attention_mask"


class StatefulLayers:
    """The modules of a model that have states, whose `shapes` these are, and the way in which each is computed.

    With our kernels all sequences go through a layer at once, where that gives what its module gives. Else they go one
    by one, and where a module takes up a state with one token only (those of Mamba's first version) token by token.
    """

    def __init__(self, modules: Mapping[int, tuple[nn.Module, str]], shapes: list[StateShape], num_layers: int) -> None:
        from transformers.cache_utils import Cache, LinearAttentionLayer

        self.shapes = shapes
        self.ways: dict[int, Way] = dict.fromkeys(modules, "pieces")
        self._modules = dict(modules)
        self._own: dict[int, Callable[..., Any]] = {}
        self._widths: dict[int, int] = {}
        self._spanned: dict[int, Callable[..., Any]] = {}
        self._functions: SpannedFunctions | None = None
        self._spans: StateSpans | None = None
        counts = {layer: 1 + max(_index(each) for each in shapes if each.layer == layer) for layer in modules}
        self._cache = Cache([LinearAttentionLayer(counts.get(layer, 1)) for layer in range(num_layers)])
        for layer, (module, parameter) in modules.items():
            self._own[layer] = _widely(module.forward)
            module.forward = functools.partial(self._forward, layer, parameter)

    def allocate(self, rows: int, device: torch.device, ops: Ops) -> RecurrentStates:
        """Make rows for the states, and see how each layer is computed: it has to have computed a text before."""
        self.states = RecurrentStates(self.shapes, rows, device)
        kernels = ops.recurrence()
        if kernels is not None:
            self._functions = SpannedFunctions(ops, kernels, lambda layer, name: self.states.of_layer(layer)[name])
        for layer, (module, _) in self._modules.items():
            kinds = {each.name.split("/")[0] for each in self.shapes if each.layer == layer}
            exact = ops.quantization == "none" and self._dtype == torch.float32
            if not any(self._try(layer, spanned, exact) for spanned in self._forwards_of(module, kinds)):
                self.ways[layer] = "pieces" if self._takes_up(layer) else "tokens"
        self.states.clear(0)
        return self.states

    def _forwards_of(self, module: nn.Module, kinds: set[str]) -> Iterator[Callable[..., Any]]:
        """What may be run in its place, with our kernels: the fastest first."""
        if self._functions is not None:
            for found in (shortened(module, self._functions), self._functions.forward_of(module, kinds)):
                if found is not None:
                    yield found

    def _try(self, layer: int, spanned: Callable[..., Any], exact: bool) -> bool:
        """Have the layer computed so; return whether that is right."""
        self._spanned[layer], self.ways[layer] = spanned, "kernels"
        return self._is_right(layer, exact)

    def _is_right(self, layer: int, exact: bool) -> bool:
        """Whether a text of random rows, in two parts, gives what the module makes of it at once."""
        hidden = self._random(layer)
        wanted = self._own[layer](hidden[None])[0]
        self.states.clear(0)
        try:
            found = torch.cat([self._part(layer, hidden, *part) for part in ((0, _CUT), (_CUT, _ROWS))])
        except Exception as error:  # of any kind, as it is anybody's code
            log.info("layer %d is not computed by our kernels: %s", layer, error)
            return False
        return bool((found - wanted).abs().max() <= (_SAME if exact else _ALIKE) * wanted.abs().max())

    def _takes_up(self, layer: int) -> bool:
        """Whether what its module makes of several tokens depends on the recurrent state before them, if it has one."""
        hidden, found = self._random(layer), []
        for filled in (0.0, 1.0):
            self.states.clear(0)
            for name, tensor in self.states.of_layer(layer).items():
                tensor[0].fill_(filled if name.startswith("recurrent") else 0.0)
            found.append(self._part(layer, hidden, _CUT, _ROWS))
        return not torch.equal(*found) or all(name.startswith("conv") for name in self.states.of_layer(layer))

    def _random(self, layer: int) -> Tensor:
        like = next(self._modules[layer][0].parameters())
        generator = torch.Generator().manual_seed(layer)
        return torch.randn(_ROWS, self._widths[layer], generator=generator).to(like.device, self._dtype)

    def _part(self, layer: int, hidden: Tensor, begin: int, end: int) -> Tensor:
        with self.under_way(StateSpans([0], [begin], [0, end - begin], {})):
            return self._forward(layer, self._modules[layer][1], hidden[None, begin:end])[0]

    @contextmanager
    def under_way(self, spans: StateSpans) -> Iterator[None]:
        """Around a pass through these states."""
        with self.states.passing(spans):
            self._spans = spans
            if self._functions is not None:
                self._functions.prepare(spans)
            try:
                yield
            finally:
                self._spans = None

    def _forward(self, layer: int, parameter: str, hidden_states: Tensor, **others: Any) -> Tensor:
        """What stands in a module's place: hidden states [1, T, H] of all sequences, end to end -> [1, T, H]."""
        spans, own = self._spans, self._own[layer]
        if spans is None:
            # A short text that is tried, without anything before it.
            self._widths[layer], self._dtype = hidden_states.shape[-1], hidden_states.dtype
            found: Tensor = own(hidden_states, **others)
            return found
        if others.get(_MASK) is not None:
            raise UnsupportedModel("layers with states are given a mask, which is not read")
        if self.ways[layer] == "kernels":
            assert self._functions is not None
            others[parameter] = self._functions.cache
            given: Tensor = self._spanned[layer](hidden_states, **others)
            return given
        others[parameter] = self._cache
        compute = functools.partial(own, **others)
        out: Tensor | None = None
        for rows, tokens, targets in _pieces(spans, self.ways[layer] == "tokens"):
            part = self._through(layer, rows, compute, hidden_states[0, tokens])
            for target in targets:
                self.states.copy(rows[0], target, layer)
            if out is None:
                out = part.new_empty(1, hidden_states.shape[1], part.shape[-1])
            out[0, tokens] = part
        assert out is not None
        return out

    def _through(self, layer: int, rows: list[int], compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Have tokens [T, H] go through the states in these rows: all through one, or one through each."""
        alone = len(rows) == 1
        place = slice(rows[0], rows[0] + 1) if alone else torch.tensor(rows, device=hidden.device)
        tensors = self.states.of_layer(layer)
        held = {name: tensor[place] for name, tensor in tensors.items()}
        cached: Any = self._cache.layers[layer]
        for name, tensor in held.items():
            kind, index = name.split("/")
            getattr(cached, f"{kind}_states")[int(index)] = tensor
            getattr(cached, f"is_{kind}_states_initialized")[int(index)] = True
            cached.has_previous_state[int(index)] = True
            if kind == "conv":
                cached.conv_kernel_size[int(index)] = tensor.shape[-1]
        found = compute(hidden[None] if alone else hidden[:, None])
        for name, tensor in tensors.items():
            kind, index = name.split("/")
            now = getattr(cached, f"{kind}_states")[int(index)]
            if now.shape != held[name].shape:
                raise UnsupportedModel(f"the state of layer {layer} grows with the text")
            if not alone or now is not held[name]:
                tensor[place] = now
        return found[0] if alone else found[:, 0]


def _widely(forward: Callable[..., Any]) -> Callable[..., Any]:
    def compute(hidden_states: Tensor, **named: Any) -> Any:
        if hidden_states.dtype != torch.bfloat16 or hidden_states.device.type != "cpu":
            return forward(hidden_states, **named)
        with WideConvolutions():
            return forward(hidden_states, **named)

    return compute


def _index(shape: StateShape) -> int:
    return int(shape.name.split("/")[1])


def _pieces(spans: StateSpans, singly: bool) -> Iterator[tuple[list[int], Any, list[int]]]:
    """Rows, the tokens that go through their states at once, and where the state is copied then.

    Sequences of one token each go together. Who is cut at its beginning or end needs no cut. With `singly` only the
    first piece of a text has more than one token.
    """
    starts, single = spans.starts, []
    for index, row in enumerate(spans.rows):
        begin, stop = starts[index], starts[index + 1]
        if stop == begin + 1:
            single.append(index)
            continue
        targets: dict[int, list[int]] = {stop: []}
        for count, target in spans.cuts.get(index, ()):
            if 0 < count < stop - begin:
                targets.setdefault(begin + count, []).append(target)
        first = begin
        for end in sorted(targets):
            if singly and (spans.first[index] or first > begin):
                for place in range(first, end - 1):
                    yield [row], slice(place, place + 1), []
                first = end - 1
            yield [row], slice(first, end), targets[end]
            first = end
    if single:
        rows = [spans.rows[index] for index in single]
        places = [starts[index] for index in single]
        yield rows, slice(places[0], places[0] + 1) if len(rows) == 1 else places, []


def probe(model: nn.Module, config: Any, compute: Callable[[Any], Tensor]) -> tuple[Tensor, StatefulLayers | None]:
    """Compute something with transformers' own cache, and see by it which modules have states.

    `compute` is given the cache, or None where the family has none with states. Returns what it gave.
    """
    cache, users = _watching_cache(config)
    if cache is None:
        return compute(None), None
    stack: list[tuple[nn.Module, str | None]] = []
    hooks: list[Any] = []

    def enter(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        stack.append((module, next((name for name, value in named.items() if value is cache), None)))

    def leave(module: nn.Module, args: tuple[Any, ...], found: Any) -> None:
        stack.pop()

    def used(layer: int) -> None:
        users.setdefault(layer, stack[-1])

    cache.used = used
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
    try:
        with WideConvolutions():
            found = compute(cache)
    finally:
        for hook in hooks:
            hook.remove()
    modules = {}
    for layer, (module, parameter) in users.items():
        if parameter is None or next(iter(inspect.signature(module.forward).parameters)) != "hidden_states":
            raise UnsupportedModel(f"layer {layer} has a state, and takes it in a way that is not known")
        modules[layer] = module, parameter
    return found, StatefulLayers(modules, _shapes(cache, users), len(cache.layers)) if modules else None


def _watching_cache(config: Any) -> tuple[Any, dict[int, tuple[nn.Module, str | None]]]:
    """transformers' cache for such a model, which tells who asks it for states; None if it has no layer with any."""
    users: dict[int, tuple[nn.Module, str | None]] = {}
    try:
        from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

        class _Watching(DynamicCache):
            """Notes which layers' states are asked for."""

            used: Callable[[int], None]

            def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
                self.used(layer_idx)
                return super().get_conv_state(layer_idx, state_idx)

            def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
                self.used(layer_idx)
                return super().get_recurrent_state(layer_idx, state_idx)

        cache = _Watching(config=config)
    except Exception:  # older versions, and families whose layers it does not know: attention finds out
        return None, users
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return None, users
    return cache, users


def _shapes(cache: Any, layers: Mapping[int, Any]) -> list[StateShape]:
    shapes = []
    for layer in sorted(layers):
        for kind in _KINDS:
            for index, tensor in sorted(getattr(cache.layers[layer], f"{kind}_states").items()):
                if tensor is not None:
                    shapes.append(StateShape(layer, f"{kind}/{index}", tuple(tensor.shape[1:]), tensor.dtype))
    return shapes
