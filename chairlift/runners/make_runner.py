"""Which runner serves which kind of model. Each is imported only when it is needed."""

from chairlift.config.items import ItemConfig
from chairlift.runners.items import ItemRunner


def make_runner(config: ItemConfig) -> ItemRunner:
    """Return a runner that has loaded nothing yet."""
    if config.kind == "onnx":
        from chairlift.runners.onnx import OnnxRunner

        return OnnxRunner(config)
    if config.kind == "python":
        from chairlift.runners.function import FunctionRunner

        return FunctionRunner(config)
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
