"""What a model's folder says of sampling: it holds for requests that say nothing of it."""

from pathlib import Path
from typing import Any

import msgspec

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import read_object

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Those sampling parameters that generation_config.json has, as vLLM reads them: without `do_sample`.

    Raises UnsupportedModel for a value that no request may have.
    """
    told = read_object(folder / _FILE)
    found = {name: value for name in _NAMES if (value := told.get(name)) is not None}
    try:
        params = msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        wrong = f"{folder / _FILE} says of sampling what no request may say: {error}"
        raise UnsupportedModel(f'{wrong}; mend it, or set generation_config = "none"') from None
    return {name: getattr(params, name) for name in found}
