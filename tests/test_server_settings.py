"""Settings: every source, their order, and refusals that name the culprit."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.server.config import ServerConfig
from chairlift.server.settings import HELP, Settings, add_flags, load, model_name

FIELDS = [*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__]


def settings(folder: Path, *argv: str, env: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    (folder / "m").mkdir(exist_ok=True)
    return load(vars(parser.parse_args(argv)), env or {}, folder, "m")


def test_defaults_serve_the_demo(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert made.engine == EngineConfig(model="m", served_model_name="demo")
    assert made.server == ServerConfig()
    assert model_name(made.engine) == "demo"
    assert model_name(settings(tmp_path, "m").engine) == "m"


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text("port = 1\nmax_num_seqs = 2\nmax_waiting = 3\n")
    made = settings(tmp_path, "--port", "10", env={"CHAIRLIFT_PORT": "11", "CHAIRLIFT_MAX_NUM_SEQS": "12"})
    assert (made.server.port, made.engine.max_num_seqs, made.server.max_waiting) == (10, 12, 3)


def test_settings_file_may_be_named_in_three_ways(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 9\n")
    assert settings(tmp_path, "other.toml").server.port == 9
    assert settings(tmp_path, "--config", "other.toml").server.port == 9
    assert settings(tmp_path, env={"CHAIRLIFT_CONFIG": "other.toml"}).server.port == 9
    with pytest.raises(ConfigError, match=r"absent\.toml can't be read"):
        settings(tmp_path, "absent.toml")


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag_a_variable_and_a_key_with_help(name: str, tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "model": "m",
        "dtype": "float32",
        "device": "cuda",
        "ops": "reference",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        "strategy": "static",
    }
    odd |= {"enable_prefix_caching": False, "log_level": "debug", "max_wait_ms": 2.5, "kv_cache_gb": 1.5}
    odd |= {"served_model_name": "x", "host": "::1", "api_key": "k", "max_num_batched_tokens": 99}
    value = odd.get(name, 77)
    flag = ["m"] if name == "model" else [f"--{name.replace('_', '-')}", str(value)]
    if value is False:
        flag = [f"--no-{name.replace('_', '-')}"]
    seats = {"CHAIRLIFT_MAX_NUM_SEQS": "9"} if name == "max_num_batched_tokens" else {}
    if name in ("batch_size", "max_wait_ms"):
        seats = {"CHAIRLIFT_STRATEGY": "dynamic"}
    for made in (
        settings(tmp_path, *flag, env=seats),
        settings(tmp_path, env=seats | {f"CHAIRLIFT_{name.upper()}": str(value)}),
        _from_toml(tmp_path, name, value, seats),
    ):
        assert getattr(made.engine if hasattr(made.engine, name) else made.server, name) == value
    assert HELP[name]


def _from_toml(folder: Path, name: str, value: Any, env: dict[str, str]) -> Settings:
    text = f'"{value}"' if isinstance(value, str) else str(value).lower()
    (folder / "chairlift.toml").write_text(f"{name} = {text}\n")
    return settings(folder, env=env)


def test_docs_name_every_setting() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("toml", "env", "problem"),
    [
        ("max_seqs = 1", {}, "unknown key 'max_seqs'; did you mean 'max_num_seqs'"),
        ("[engine]\nseed = 1", {}, "unknown key 'engine'"),
        ('port = "80"', {}, r"chairlift\.toml: port: expected int, got str, got '80'"),
        ("port =", {}, "not valid TOML"),
        ('strategy = "fast"', {}, "strategy: must be one of none, static, dynamic, continuous, got 'fast'"),
        ("", {"CHAIRLIFT_PORT": "many"}, "CHAIRLIFT_PORT: expected int"),
        ("", {"CHAIRLIFT_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks"),
        ("port = 70000", {}, "port must be between"),
        ('quantization = "int4"', {}, "quantization: must be one of none, int8, got 'int4'"),
        ("batch_size = 0", {}, "batch_size must be at least 1"),
        ("batch_size = 3", {}, "batch_size has no effect under the continuous strategy"),
        ('model = "nowhere"', {}, "'nowhere' is not a folder"),
    ],
)
def test_refusals_name_the_setting(toml: str, env: dict[str, str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(toml)
    with pytest.raises(ConfigError, match=problem):
        settings(tmp_path, env=env)


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nothing")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--nonsense"])
