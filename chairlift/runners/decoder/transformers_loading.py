"""How transformers loads a model from a folder's files, or a GGUF file, whatever these are packed in."""

import contextlib
import json
import tempfile
import threading
import traceback
from collections.abc import Iterator
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
            _refuse_made_up(folder, empty)
            # All that is of another shape is named below, and not in transformers' log.
            told: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME, "ignore_mismatched_sizes": True}
            told |= {"output_loading_info": True, **_SAFELY}
            if later := gguf_tensors(folder, dtype):
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


def _refuse_made_up(folder: Path, empty: Any) -> None:
    """Raise UnsupportedModel for what is in no file, and would be made up, before memory is taken for it."""
    wanted = sum(each.numel() for each in empty.parameters())
    gguf = folder / GGUF_WEIGHTS
    held = numbers_of(gguf) if gguf.exists() else count_numbers(folder) or 0
    if wanted > held:
        raise UnsupportedModel(f"by config.json it has {wanted:,} numbers, and its files hold {held:,}")


def _unpacked(folder: Path, packing: QuantizationConfig, empty: Any, told: dict[str, Any]) -> tuple[Any, Any]:
    """A model like that empty one of packed projections, and what transformers says of how it was loaded."""
    if any(type(module).__name__ == "Conv1D" for module in empty.modules()):
        name = empty.config.model_type
        raise UnsupportedModel(f"quantization_config is not read for {name}, whose weights are transposed")
    one_at_a_time = threading.Lock()
    with Weights(folder, told["dtype"], torch.device("cpu"), packing) as weights:

        def get(name: str) -> Tensor:
            # Several threads ask, and unpacking takes some times what it gives.
            with one_at_a_time:
                return weights.whole(name)

        later = later_tensors(weights.names(), get)
        model, loading = type(empty).from_pretrained(None, config=empty.config, state_dict=later, **told)
        # Those that are zero may be called otherwise here, but then no others are left.
        if not any(name.endswith(".bias") for name in weights.unused()):
            kept = {name for name in loading["unexpected_keys"] if not name.endswith(".bias")}
            loading = {**loading, "unexpected_keys": kept}
    return model, loading


def _refuse_unlike(loading: dict[str, Any]) -> None:
    """Raise UnsupportedModel if transformers says that files and model are not alike."""
    for name, found, wanted in sorted(loading["mismatched_keys"])[:1]:
        problem = f"tensor {name!r} has shape {list(found)}, but config.json asks for {list(wanted)}"
        raise UnsupportedModel(problem)
    for unlike in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, loading[unlike])):
            raise UnsupportedModel(f"{unlike.replace('_keys', '')} tensors: {', '.join(names[:3])}")


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
