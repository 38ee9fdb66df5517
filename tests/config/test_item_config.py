"""Settings of models that answer in one call: what kind a model is, and what is refused by name."""

from typing import Any

import msgspec
import pytest

from chairlift.config.items import ItemConfig, split_class
from chairlift.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("models/minilm", "encoder"),
        ("resnet.onnx", "onnx"),
        ("package.module:Model", "python"),
        ("/a/b.py:Model", "python"),
        ("/a:b/minilm-v2.1", "encoder"),
    ],
)
def test_kind_follows_from_the_name(model: str, kind: str) -> None:
    config = ItemConfig(model=model)
    assert config.kind == kind
    assert msgspec.json.decode(msgspec.json.encode(config), type=ItemConfig) == config


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model": "a.py"}, "name the class in it too, as a.py:Class"),
        ({"model": "folder", "kind": "python"}, "must be given as module:Class"),
        ({"kind": "tensorflow"}, "kind must be one of auto, encoder, onnx, python"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1"),
        ({"max_wait_ms": -1}, "max_wait_ms must be at least 0"),
        ({"timeout_ms": 0}, "timeout_ms must be positive"),
        ({"target_latency_ms": float("nan")}, "target_latency_ms must be positive"),
        ({"target_latency_ms": 50, "max_wait_ms": 5}, "leave max_wait_ms out"),
        ({"instances": 0}, "instances must be at least 1"),
        ({"call_timeout_s": float("inf")}, "call_timeout_s must be positive"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"heartbeat_timeout_s": float("inf")}, "heartbeat_timeout_s must be at least 1"),
        ({"warm_up_sizes": (1, 0)}, "warm_up_sizes must be at least 1 each"),
        ({"outputs": ("y",)}, "outputs has no effect on 'folder', which is of kind encoder: it belongs to onnx"),
        ({"options": {"a": 1}}, "options has no effect"),
        ({"model": "m:C", "device": "cuda"}, "device has no effect .* belongs to encoder and onnx"),
        ({"model": "m.onnx", "max_batch_tokens": 100}, "max_batch_tokens has no effect"),
        ({"model": "m.onnx", "outputs": ()}, "outputs must name at least one"),
    ],
    ids=str,
)
def test_what_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ItemConfig(**({"model": "folder"} | settings))


def test_sizes_to_warm_up() -> None:
    assert ItemConfig(model="m").warm_up_for(1) == [1]
    assert ItemConfig(model="m").warm_up_for(32) == [1, 2, 4, 8, 16, 32]
    assert ItemConfig(model="m").warm_up_for(5) == [1, 2, 4, 5]
    assert ItemConfig(model="m", warm_up_sizes=()).warm_up_for(32) == []
    assert ItemConfig(model="m", warm_up_sizes=(3,)).warm_up_for(32) == [3]


def test_class_names() -> None:
    assert split_class("C:/x/y.py:Model") == ("C:/x/y.py", "Model")
