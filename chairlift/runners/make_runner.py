"""Which runner serves which kind of model. Each is imported only when it is needed."""

from pathlib import Path

from chairlift.config.items import ItemConfig
from chairlift.folders.model_json import read_model_json
from chairlift.folders.multimodal import is_native
from chairlift.runners.items import ItemRunner
from chairlift.runners.uncollected import nothing_collected


def make_runner(config: ItemConfig) -> ItemRunner:
    """Return a runner that has loaded nothing yet. Raises as reading the folder's config.json does."""
    if config.kind == "onnx":
        from chairlift.runners.onnx import OnnxRunner

        return OnnxRunner(config)
    if config.kind == "python":
        from chairlift.runners.function import FunctionRunner

        return FunctionRunner(config)
    _check_folder(Path(config.model))
    with nothing_collected():
        from chairlift.runners.encoder.runner import EncoderRunner

    return EncoderRunner(
        config.model,
        device=config.device,
        dtype=config.dtype,
        ops=config.ops,
        quantization=config.quantization,
        max_tokens=config.max_model_len,
        num_threads=config.num_threads,
    )


def _check_folder(folder: Path) -> None:
    """Refuse what can't be served before torch is loaded, which takes seconds."""
    from chairlift.runners.decoder.config import read_config
    from chairlift.runners.encoder.config import read_encoder_config

    if is_native(read_model_json(folder)):
        read_config(folder)
    else:
        read_encoder_config(folder)
