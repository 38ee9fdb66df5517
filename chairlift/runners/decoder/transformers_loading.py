"""How transformers loads a model from a folder's files, or a GGUF file, whatever these are packed in."""

import contextlib
import ctypes
import json
import math
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chairlift.errors import UnsupportedModel, clip
from chairlift.folders.quantization_config import QuantizationConfig
from chairlift.folders.tensor_files import (
    GGUF_WEIGHTS,
    WEIGHTS,
    WEIGHTS_INDEX,
    count_numbers,
    names_weights,
    weight_files,
)
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.gguf.tensor_types import numbers_of
from chairlift.runners.decoder.later_tensor import later_tensors
from chairlift.runners.decoder.transformers_attention import NAME, attention
from chairlift.runners.decoder.transformers_gguf import gguf_tensors
from chairlift.runners.error_text import first_line
from chairlift.runners.weights import Weights

# Families that read images too, of which transformers has no part for texts by itself.
_WHOLE = {"mistral3", "qwen3_vl_moe", "lfm2_vl"}
# What has transformers unpack weights by itself, by other packages.
_PACKED = ("quantization_config", "compression_config")
# How many bytes are unpacked before what is free is given back, which takes some hundredths of a second.
_TRIM_BYTES = 2**27
_SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(folder: Path, packing: QuantizationConfig | None, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model, from safetensors alone and without any code of the folder.

    Raises UnsupportedModel, naming tensors that are missing, or left, or of another shape than config.json asks for.
    """
    # Its annotations do not say what its functions give.
    transformers: Any = import_module("transformers")
    transformers.AttentionInterface.register(NAME, attention)
    with quiet():
        try:
            config = _config_of(transformers, folder)
            whole = config.model_type in _WHOLE
            kind = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
            with torch.device("meta"):
                empty = kind.from_config(config, trust_remote_code=False)
            gguf = gguf_tensors(folder, dtype)
            _refuse_made_up(empty, folder, packing, gguf)
            # All that is of another shape is named below, and not in transformers' log.
            told: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME, "ignore_mismatched_sizes": True}
            told |= {"output_loading_info": True, **_SAFELY}
            if gguf is not None:
                later = later_tensors(gguf.keys(), gguf.get_tensor)
                model, loading = type(empty).from_pretrained(None, config=config, state_dict=later, **told)
            elif packing is not None:
                model, loading = _unpacked(folder, packing, empty, told)
            else:
                with _with_index(folder) as indexed:
                    model, loading = kind.from_pretrained(indexed, config=config, use_safetensors=True, **told)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"transformers can't load it: {_reason(error)}") from error
    _refuse_unlike(loading)
    return model.eval().requires_grad_(False).to(device)


def _config_of(transformers: Any, folder: Path) -> Any:
    """What transformers makes of config.json, as if nothing were packed."""
    config = transformers.AutoConfig.from_pretrained(folder, **_SAFELY)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in _PACKED:
            if hasattr(part, name):
                delattr(part, name)
    return config


def _refuse_made_up(empty: Any, folder: Path, packing: QuantizationConfig | None, gguf: HybridTensors | None) -> None:
    """Raise UnsupportedModel for what is in no file, and would be made up, before memory is taken for it."""
    wanted = {name: tuple(each.shape) for name, each in empty.named_parameters()}
    count = sum(map(math.prod, wanted.values()))
    held = count_numbers(folder) or 0 if gguf is None else numbers_of(folder / GGUF_WEIGHTS) + gguf.count_told()
    if count <= held:
        return
    for name, found in _shapes(folder, packing) if gguf is None else gguf.shapes():
        # Transformers may turn it round.
        if name in wanted and math.prod(found) < math.prod(wanted[name]):
            raise _unlike(name, found, wanted[name])
    raise UnsupportedModel(f"by config.json it has {count:,} numbers, and its files hold {held:,}")


def _shapes(folder: Path, packing: QuantizationConfig | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors of safetensors files."""
    with Weights(folder, torch.float32, torch.device("cpu"), packing) as weights:
        for name in weights.names():
            yield name, weights.shape(name)


def _unpacked(folder: Path, packing: QuantizationConfig, empty: Any, told: dict[str, Any]) -> tuple[Any, Any]:
    """A model like that empty one of packed projections, and what transformers says of how it was loaded."""
    if any(type(module).__name__ == "Conv1D" for module in empty.modules()):
        name = empty.config.model_type
        raise UnsupportedModel(f"quantization_config is not read for {name}, whose weights are transposed")
    with Weights(folder, told["dtype"], torch.device("cpu"), packing) as weights:
        reader = _InTurn(weights)
        later = later_tensors(weights.names(), reader.get)
        model, loading = type(empty).from_pretrained(None, config=empty.config, state_dict=later, **told)
        reader.trim()
        # Those that are zero may be called otherwise here, but then no others are left.
        if not any(name.endswith(".bias") for name in weights.unused()):
            kept = {name for name in loading["unexpected_keys"] if not name.endswith(".bias")}
            loading = {**loading, "unexpected_keys": kept}
    return model, loading


class _InTurn:
    """Reads tensors one at a time for threads that ask at once: unpacking takes several times what it gives.

    What is freed meanwhile goes back to the system, as the C library keeps it for each thread.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights, self._one_at_a_time, self._freed = weights, threading.Lock(), 0
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def get(self, name: str) -> Tensor:
        with self._one_at_a_time:
            found = self._weights.whole(name)
            self._freed += found.nbytes
            if self._freed > _TRIM_BYTES:
                self.trim()
            return found

    def trim(self) -> None:
        self._freed = 0
        if self._malloc_trim is not None:
            self._malloc_trim(0)


def _refuse_unlike(loading: dict[str, Any]) -> None:
    """Raise UnsupportedModel if transformers says that files and model are not alike."""
    for name, found, wanted in sorted(loading["mismatched_keys"])[:1]:
        raise _unlike(name, found, wanted)
    for unlike in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, loading[unlike])):
            raise UnsupportedModel(f"{unlike.replace('_keys', '')} tensors: {', '.join(names[:3])}")


def _unlike(name: str, found: Sequence[int], wanted: Sequence[int]) -> UnsupportedModel:
    return UnsupportedModel(f"tensor {name!r} has shape {list(found)}, but config.json asks for {list(wanted)}")


def _reason(error: Exception) -> str:
    """What an error says; of tensors that can't be put together transformers says which only in its log."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        failed = getattr(frame.f_locals.get("loading_info"), "conversion_errors", None)
        for name, text in sorted(failed.items()) if isinstance(failed, dict) else ():
            # A traceback, its error, and which step it was.
            lines = [line for line in str(text).splitlines() if line]
            return f"what {name!r} is made of can't be put together: {clip(' '.join(lines[-2:-1]), 300)}"
    return first_line(error)


@contextlib.contextmanager
def _with_index(folder: Path) -> Iterator[Path]:
    """A folder as transformers reads it: where parts of weights have no index, one of links to all, with an index."""
    if names_weights(folder):
        yield folder
        return
    parts = weight_files(folder)
    with tempfile.TemporaryDirectory() as made:
        for path in folder.iterdir():
            if path.name not in (WEIGHTS, WEIGHTS_INDEX):
                (Path(made) / path.name).symlink_to(path.absolute())
        places: dict[str, str] = {}
        for part in parts:
            with safe_open(part, framework="pt") as opened:
                places.update(dict.fromkeys(opened.keys(), part.name))
        (Path(made) / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        yield Path(made)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither bars nor warnings, which are for those who train, or of kernels that are not installed."""
    transformers: Any = import_module("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()
