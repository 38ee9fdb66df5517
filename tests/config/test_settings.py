"""Settings: every source, their order, and refusals that name the culprit."""

import argparse
import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chairlift.cli import main
from chairlift.config.flags import HELP, add_flags, model_flags
from chairlift.config.items import ItemConfig
from chairlift.config.other_names import INSTEAD, OURS, hint
from chairlift.config.run import RunConfig, run_config
from chairlift.config.run import add_flags as add_run_flags
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ModelConfig, Settings, Share, load
from chairlift.errors import ConfigError

FIELDS = sorted({*SequenceConfig.__struct_fields__, *ItemConfig.__struct_fields__, *ServerConfig.__struct_fields__})


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model_type in (("m", "llama"), ("encoder", "bert")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    (tmp_path / "net.onnx").touch()


def settings(folder: Path, *argv: str, env: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load(vars(parser.parse_args(argv)), env or {}, folder, "m")


def only(made: Settings) -> ModelConfig:
    (served,) = made.models
    return served.config


def test_defaults_serve_the_demo(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert only(made) == SequenceConfig(model="m", served_model_name="demo")
    assert made.server == ServerConfig()
    assert made.models[0].name == "demo"
    assert settings(tmp_path, "m").models[0].name == "m"


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        ("encoder", "encoder", "encoder"),
        ("net.onnx", "onnx", "net"),
        ("package.module:Classifier", "python", "Classifier"),
        ("serve/model.py:Model", "python", "Model"),
    ],
)
def test_what_a_model_is_follows_from_its_name_and_files(model: str, kind: str, name: str, tmp_path: Path) -> None:
    made = settings(tmp_path, model, "--max-batch-size", "9")
    config = only(made)
    assert isinstance(config, ItemConfig)
    assert (config.kind, config.max_batch_size, made.models[0].name) == (kind, 9, name)


def test_kind_goes_before_what_the_files_say(tmp_path: Path) -> None:
    config = only(settings(tmp_path, "m", "--kind", "encoder"))
    assert isinstance(config, ItemConfig)


SEVERAL = """
port = 7
[models.chat]
model = "m"
max_num_seqs = 3
weight = 2
[models.embed]
model = "encoder"
max_batch_tokens = 4096
[models.net]
model = "net.onnx"
version = "2"
served_model_name = "resnet"
"""


def test_a_file_may_have_several_models(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(SEVERAL)
    made = settings(tmp_path, env={"CHAIRLIFT_HOST": "::1"})
    assert (made.server.port, made.server.host) == (7, "::1")
    assert [(served.name, served.share) for served in made.models] == [
        ("chat", Share(weight=2)),
        ("embed", Share()),
        ("resnet", Share(version="2")),
    ]
    chat, embed, net = (served.config for served in made.models)
    assert isinstance(chat, SequenceConfig)
    assert isinstance(embed, ItemConfig)
    assert isinstance(net, ItemConfig)
    assert (chat.max_num_seqs, embed.max_batch_tokens, net.kind) == (3, 4096, "onnx")


def test_a_version_may_be_a_whole_number(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text('[models.a]\nmodel = "m"\nversion = 2\n')
    assert settings(tmp_path).models[0].share.version == "2"


@pytest.mark.parametrize("models", [SEVERAL, 'port = 7\nmodel = "net.onnx"\nmax_batch_size = 3\n'])
def test_a_model_on_the_command_line_goes_before_those_of_a_file_that_lies_there(models: str, tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(models)
    made = settings(tmp_path, "encoder")
    assert [served.name for served in made.models] == ["encoder"]
    assert only(made) == ItemConfig(model="encoder")
    # The server is the same, whatever it serves: a key that it asks for must not be lost.
    assert made.server.port == 7
    assert "chairlift.toml here names other models than encoder: of its settings the server's hold (port)" in made.note
    assert settings(tmp_path).note == ""


def test_aliases_are_new_names_of_models_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text('model_aliases = {gpt = "chat", "gpt 2" = "chat"}' + SEVERAL)
    assert settings(tmp_path).server.model_aliases == {"gpt": "chat", "gpt 2": "chat"}
    # They mean nothing beside a model that is named on the command line.
    assert settings(tmp_path, "encoder").server.model_aliases == {}
    for given, problem in (({"x": "y"}, "'x' is to be 'y'"), ({"m": "m"}, "new names"), ({"": "m"}, "new names")):
        with pytest.raises(ConfigError, match=problem):
            settings(tmp_path, "m", "--model-aliases", json.dumps(given), "--served-model-name", "m")


def test_a_file_that_names_no_model_or_the_same_one_holds(tmp_path: Path) -> None:
    for named in ("", 'model = "./m"\n'):
        (tmp_path / "chairlift.toml").write_text(f"max_num_seqs = 3\n{named}")
        made = settings(tmp_path, "m")
        config = only(made)
        assert isinstance(config, SequenceConfig)
        assert (config.max_num_seqs, made.note) == (3, "")


def test_a_file_that_was_asked_for_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(SEVERAL)
    with pytest.raises(ConfigError, match="--model is a model's setting, but"):
        settings(tmp_path, "encoder", "--config", "chairlift.toml")


def test_a_key_that_is_unknown_is_one_in_a_file_that_is_passed_over_too(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text('api_kye = "k"\n[models.a]\nmodel = "m"\n')
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        settings(tmp_path, "encoder")


@pytest.mark.parametrize(
    "variable",
    ["CHAIRLIFT_SERVICE_PORT", "CHAIRLIFT_PORT_8000_TCP_ADDR", "CHAIRLIFT_HTTP_PORT", "CHAIRLIFT_HISTORIES", "PORTS"],
)
def test_variables_of_others_are_passed_over(variable: str, tmp_path: Path) -> None:
    assert settings(tmp_path, env={variable: "tcp://10.0.0.1:80"}) == settings(tmp_path)


def test_names_of_other_servers_lead_to_settings_that_there_are() -> None:
    assert set(OURS.values()) <= set(FIELDS)
    assert not (OURS.keys() | INSTEAD.keys() - {"model"}) & set(FIELDS)
    assert not OURS.keys() & INSTEAD.keys()


@pytest.mark.parametrize(
    ("command", "flag", "says"),
    [
        ("serve", "--max-num-sequences", "there is no --max-num-sequences; did you mean --max-num-seqs?"),
        ("serve", "--hostname=::1", "there is no --hostname; that is --host here"),
        ("serve", "--tensor-parallel-size", "there is no --tensor-parallel-size; leave it out: a model runs on one"),
        ("serve", "--enforce-eager", "leave it out: not needed, because decodes are recorded as CUDA graphs"),
        ("serve", "--model-repository", "give each model a table [models.NAME] in chairlift.toml"),
        ("serve", "--max-concurrent-requests", "that is --max-waiting here"),
        ("serve", "--reasoning-parser", "leave it out: not needed, because the chat template tells"),
        ("serve", "--model-control-mode", "`model_control` lets clients load and unload"),
        ("serve", "--model", "name the model as the first argument"),
        ("serve", "--qqqq", "there is no --qqqq\n"),
        ("run", "--concurency", "did you mean --concurrency?"),
        ("plan", "--ttft-ms", "did you mean --target-ttft-ms?"),
        ("why", "--faster", "there is no --faster\n"),
        ("bench", "--quick", "there is no --quick"),
    ],
)
def test_a_flag_that_there_is_not(command: str, flag: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {"run": ["in.jsonl", "-o", "out.jsonl"], "bench": ["strategies"], "plan": ["m"], "why": ["ID"]}
    with pytest.raises(SystemExit) as left:
        main([command, *needed.get(command, []), flag])
    assert (left.value.code, says in capsys.readouterr().err) == (2, True)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "all.toml").write_text('[models.a]\nmodel = "../encoder"\n')
    made = settings(tmp_path, "conf/all.toml")
    assert Path(only(made).model).resolve() == tmp_path / "encoder"
    (tmp_path / "conf" / "one.toml").write_text('model = "../encoder"\n')
    assert Path(only(settings(tmp_path, "conf/one.toml")).model).resolve() == tmp_path / "encoder"
    assert only(settings(tmp_path, "encoder", "--config", "conf/one.toml")).model == "encoder"


@pytest.mark.parametrize(
    ("model", "expected"), [("score.py:Score", "{folder}/conf/score.py:Score"), ("package.score:Score",) * 2]
)
def test_classes_in_a_file_are_found_from_it(model: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "all.toml").write_text(f'[models.a]\nmodel = "{model}"\n')
    assert only(settings(tmp_path, "conf/all.toml")).model == expected.format(folder=tmp_path)


@pytest.mark.parametrize(
    ("toml", "argv", "problem"),
    [
        ("models = 3", [], "must hold tables"),
        ("[models]", [], "must hold tables"),
        ("[models.a]\nseed = 1", [], "models.a must say where the model is"),
        ('[models.a]\nmodel = "m"\nwait = 1', [], "unknown key 'models.a.wait'"),
        ('[models.a]\nmodel = "m"\nport = 1', [], r"models\.a\.port is a setting of the server, .* above the first"),
        ('seed = 1\n[models.a]\nmodel = "m"', [], "seed is a model's setting"),
        ('[models.a]\nmodel = "m"', ["--seed", "1"], "--seed is a model's setting"),
        ('[models.a]\nmodel = "m"\nweight = "1"', [], r"models\.a\.weight: must be a number, got '1'"),
        ('[models.a]\nmodel = "m"\nversion = 1.5', [], r"models\.a\.version: must be text, got 1\.5"),
        ('[models.a]\nmodel = "m"\ninstance_group = 1', [], "unknown key 'models.a.instance_group'"),
        ('[models.a]\nmodel = "m"\nhttp_port = 1', [], "unknown key 'models.a.http_port'$"),
        ('[models.a]\nmodel = "m"\nweight = -1', [], "weight must not be negative"),
        (
            'max_waiting = 7\n[models.a]\nmodel = "m"\n[models.b]\nmodel = "m"\nstrategy = "static"',
            [],
            "max_waiting 7 is less than batch_size 8",
        ),
        ('[models.a]\nmodel = "m"\nmax_batch_size = 1', [], r"models\.a\.max_batch_size has no effect on 'm'"),
        ('[models.a]\nmodel = "encoder"\nmax_num_seqs = 1', [], r"models\.a\.max_num_seqs has no effect on 'encoder'"),
        ('[models.a]\nmodel = "m"\nmax_waiting = 1', [], r"models\.a\.max_waiting has no effect .* above the tables"),
        ('[models.a]\nmodel = "m"\n[models.b]\nmodel = "m"\nserved_model_name = "a"', [], "version 1 of 'a' twice"),
    ],
)
def test_refusals_of_several_models(toml: str, argv: list[str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(toml)
    with pytest.raises(ConfigError, match=problem):
        settings(tmp_path, *argv)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text("\ufeffport = 9\n", "utf-8")
    assert settings(tmp_path).server.port == 9


@pytest.mark.parametrize("models", ['model = "m"\nmax_num_seqs = 3\n', SEVERAL.removeprefix("\nport = 7")])
def test_a_commands_own_server_takes_nothing_of_the_users(models: str, tmp_path: Path) -> None:
    servers = 'api_key = "k"\ntls_cert = "c.pem"\ndata_dir = "d"\nlog_level = "error"\nmodel_aliases = {a = "b"}\n'
    (tmp_path / "chairlift.toml").write_text(servers + models)
    flags = {"model": "m", "port": "0", "data_dir": ""}
    env = {"CHAIRLIFT_HOST": "0.0.0.0", "CHAIRLIFT_RECORD": "r.jsonl", "CHAIRLIFT_MAX_NUM_BATCHED_TOKENS": "77"}
    made = load(flags, env, tmp_path, "m", own_server=True)
    assert made.server == ServerConfig(port=0, data_dir="", log_level="error")
    config = only(made)
    assert isinstance(config, SequenceConfig)
    # Those of the model hold as ever.
    of_file = 3 if models.startswith("model =") else SequenceConfig(model="m").max_num_seqs
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (of_file, 77)
    (tmp_path / "chairlift.toml").write_text('api_kye = "k"\n')
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        load(flags, {}, tmp_path, "m", own_server=True)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text("port = 1\nmax_num_seqs = 2\nmax_waiting = 3\n")
    made = settings(tmp_path, "--port", "10", env={"CHAIRLIFT_PORT": "11", "CHAIRLIFT_MAX_NUM_SEQS": "12"})
    config = only(made)
    assert isinstance(config, SequenceConfig)
    assert (made.server.port, config.max_num_seqs, made.server.max_waiting) == (10, 12, 3)


def test_the_order_of_a_run_is_its_own_and_a_models_comes_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text('order = "shortest"\n')
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    args = parser.parse_args(["in.jsonl", "-o", "out.jsonl", "--order", "length", "--seed", "5"])
    config = only(load(model_flags(args), {}, tmp_path, "m"))
    assert isinstance(config, SequenceConfig)
    assert (run_config(args).order, config.order, config.seed) == ("length", "shortest", 5)


@pytest.mark.parametrize("flag", ["--timeout-ms=3", "--max-queue-ms=3", "--auto", "--background-step-ms=3"])
def test_what_means_something_to_live_requests_alone_is_no_flag_of_a_run(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "in.jsonl", "-o", "out.jsonl", flag])
    assert f"there is no {flag.partition('=')[0]}" in capsys.readouterr().err


def test_settings_file_may_be_named_in_three_ways(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 9\n")
    assert settings(tmp_path, "other.toml").server.port == 9
    assert settings(tmp_path, "--config", "other.toml").server.port == 9
    assert settings(tmp_path, env={"CHAIRLIFT_CONFIG": "other.toml"}).server.port == 9
    with pytest.raises(ConfigError, match=r"absent\.toml can't be read"):
        settings(tmp_path, "absent.toml")


def told(section: str) -> dict[str, str]:
    """The settings in a section of the page of them, with their defaults as it says them."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = {}
    for cell, default in re.findall(r"^\| (`[^|]*) \| ([^|]*?) ?\|.*\|$", rows, re.MULTILINE):
        names = re.findall(r"`-*([\w-]+)`", cell)
        several = default.split(", ")
        for index, name in enumerate(names):
            found[name.replace("-", "_")] = several[index] if len(several) == len(names) else default
    return found


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("Several models", Share),
        ("Language models", SequenceConfig),
        ("All other models", ItemConfig),
        ("The server", ServerConfig),
        ("Batch jobs", RunConfig),
    ],
)
def test_defaults_are_those_that_the_page_says(section: str, kind: type[msgspec.Struct]) -> None:
    said = told(section)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert said.keys() == fields.keys() or kind is RunConfig
    for name in said.keys() & fields.keys():
        text, field = said[name], fields[name]
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if text == "none":
            assert default in (None, (), {}), name
        elif text in ("true", "false"):
            assert default is (text == "true"), name
        elif re.fullmatch(r"[\d.]+", text):
            assert float(default) == float(text), name
        elif default not in (None, msgspec.NODEFAULT) and text:
            # Others follow from the model or the machine, and are told in words.
            assert text == f"`{default}`", name


def test_the_help_of_all_settings_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    printed = capsys.readouterr().out
    assert (left.value.code, [name for name in FIELDS if name.replace("_", "-") not in printed]) == (0, [])


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag_a_variable_and_a_key_with_help(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The models here are none of the Hub's, and so have no revisions.
    monkeypatch.setattr("chairlift.config.settings.refuse_revision", lambda *_: None)
    value = ODD.get(name, 77)
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    flag = [text] if name == "model" else [f"--{name.replace('_', '-')}", text]
    if isinstance(value, bool):
        flag = [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
    for made in (
        settings(tmp_path, *flag, env=_company(name)),
        settings(tmp_path, env=_company(name) | {f"CHAIRLIFT_{name.upper()}": text}),
        _from_toml(tmp_path, name, value, _company(name)),
    ):
        config = only(made)
        found = getattr(config if hasattr(config, name) else made.server, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert HELP[name]


ODD: dict[str, Any] = {
    "model": "m",
    "revision": "v1",
    "implementation": "native",
    "dtype": "float32",
    "device": "cuda",
    "ops": "reference",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "strategy": "static",
    "order": "shortest",
    "tool_dialect": "hermes",
    "generation_config": "none",
    "enable_prefix_caching": False,
    "bisect": False,
    "auto": True,
    "tune_cpu_share": 0.5,
    "standby": "always",
    "log_level": "debug",
    "max_wait_ms": 2.5,
    "kv_cache_gb": 1.5,
    "served_model_name": "x",
    "host": "::1",
    "api_key": "k",
    "api_keys": "/k.toml",
    "model_control": True,
    "shared_memory": True,
    "model_aliases": {"other": "demo"},
    "show_cached_tokens": False,
    "otlp_endpoint": "http://collector:4318",
    "tls_cert": "/c.pem",
    "tls_key": "/k.pem",
    "tls_ca": "/a.pem",
    "allowed_origins": ["https://a.example"],
    "allowed_hosts": ["a.example"],
    "data_dir": "/d",
    "record": "/r.jsonl",
    "max_num_batched_tokens": 99,
    "max_stop_strings": 9,
    "kind": "encoder",
    "warm_up_sizes": [1, 3],
    "outputs": ["y"],
    "options": {"a": 1},
}


def _company(name: str) -> dict[str, str]:
    """What must be set beside a setting for it to have an effect."""
    if name == "max_num_batched_tokens":
        return {"CHAIRLIFT_MAX_NUM_SEQS": "9"}
    if name in ("batch_size", "max_wait_ms"):
        return {"CHAIRLIFT_STRATEGY": "dynamic"}
    if name in ("tls_cert", "tls_key", "tls_ca"):
        others = {"tls_cert": "c.pem", "tls_key": "k.pem"}
        return {f"CHAIRLIFT_{other.upper()}": path for other, path in others.items() if other != name}
    if name in ("outputs", "options"):
        return {"CHAIRLIFT_MODEL": {"outputs": "net.onnx", "options": "module:Class"}[name]}
    if name in ItemConfig.__struct_fields__ and name not in SequenceConfig.__struct_fields__:
        return {"CHAIRLIFT_MODEL": "encoder"}
    return {}


def _from_toml(folder: Path, name: str, value: Any, env: dict[str, str]) -> Settings:
    text = json.dumps(value)
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items()) + "}"
    (folder / "chairlift.toml").write_text(f"{name} = {text}\n")
    return settings(folder, env=env)


def test_docs_name_every_setting() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("toml", "env", "problem"),
    [
        ("max_seqs = 1", {}, "unknown key 'max_seqs'; did you mean 'max_num_seqs'"),
        ("[engine]\nseed = 1", {}, r"a table \[engine\], .* of a model in \[models.NAME\]"),
        ('port = "80"', {}, r"chairlift\.toml: port: must be a whole number, got '80'"),
        ("api_key = 1", {}, r"chairlift\.toml: api_key: must be text, got 1"),
        (
            "tensor_parallel_size = 2",
            {},
            "key 'tensor_parallel_size'; leave it out: a model runs on one device",
        ),
        ("gpu_memory_utilization = 0.9", {}, "'gpu_memory_utilization'; that is 'kv_cache_gb' here"),
        (
            "",
            {"CHAIRLIFT_MAX_NUM_SEQ": "4"},
            "NUM_SEQ is no setting; did you mean CHAIRLIFT_MAX_NUM_SEQS",
        ),
        ("", {"CHAIRLIFT_HOSTNAME": "x"}, "CHAIRLIFT_HOSTNAME is no setting; that is CHAIRLIFT_HOST here"),
        ("port =", {}, "not valid TOML"),
        ('order = "longest"', {}, r"chairlift\.toml: order: must be one of arrival, shortest, got 'longest'"),
        ("priority_ageing_ms = -1", {}, "priority_ageing_ms must not be negative"),
        ('strategy = "fast"', {}, "strategy: must be one of none, static, dynamic, continuous, got 'fast'"),
        ("", {"CHAIRLIFT_PORT": "many"}, "CHAIRLIFT_PORT: must be a whole number, got 'many'"),
        ("", {"CHAIRLIFT_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks"),
        ("port = 70000", {}, "port must be between"),
        ("max_stop_strings = 17", {}, "max_stop_strings must be between 1 and 16"),
        ("max_stop_chars_total = 0", {}, "max_stop_chars_total must be between 1 and 1024"),
        ('quantization = "int3"', {}, "quantization: must be one of none, int8, int4, got 'int3'"),
        ("batch_size = 0", {}, "batch_size must be at least 1"),
        ("heartbeat_timeout_s = 0.5", {}, "heartbeat_timeout_s must be at least 1"),
        ("step_timeout_s = 0", {}, "step_timeout_s must be positive"),
        ("target_itl_ms = inf", {}, "target_itl_ms must be a finite number, got inf"),
        ("target_ttft_ms = nan", {}, "target_ttft_ms must be a finite number, got nan"),
        ("kv_cache_gb = inf", {}, "kv_cache_gb must be a finite number"),
        ("max_wait_ms = -inf\nstrategy = 'dynamic'", {}, "max_wait_ms must be a finite number"),
        ("heartbeat_timeout_s = nan", {}, "heartbeat_timeout_s must be a finite number"),
        ("tune_cpu_share = 2", {}, "tune_cpu_share must be more than 0 and at most 1"),
        ("tune_every_s = 0", {}, "tune_every_s must be positive"),
        ("step_time_ms = -1", {}, "step_time_ms must not be negative"),
        ('strategy = "static"\nstep_time_ms = 9', {}, "step_time_ms has no effect under the static strategy"),
        ("batch_size = 3", {}, "batch_size has no effect under the continuous strategy"),
        ('model = "nowhere"', {}, "'nowhere' is no folder or file"),
        ('warm_up_sizes = [1, "a"]\nmodel = "encoder"', {}, r"warm_up_sizes: \[1\] must be a whole number, got"),
        ('allowed_origins = ["https://a.example/"]', {}, "allowed_origins must be like 'https://app.example.com'"),
        ('allowed_origins = ["null"]', {}, "allowed_origins must be like"),
        ('allowed_hosts = ["a.example:80"]', {}, "allowed_hosts must be names or addresses without a port"),
        ('model = "encoder"', {"CHAIRLIFT_WARM_UP_SIZES": "1,2"}, "CHAIRLIFT_WARM_UP_SIZES: must be JSON"),
    ],
)
def test_refusals_name_the_setting(toml: str, env: dict[str, str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "chairlift.toml").write_text(toml)
    with pytest.raises(ConfigError, match=problem):
        settings(tmp_path, env=env)


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nothing")]) == 1
    assert "is no folder or file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--nonsense"])


@pytest.mark.parametrize("command", ["serve", "run"])
def test_a_command_can_be_told_to_end_before_its_event_loop_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*given: Any, **more: Any) -> Settings:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it goes on")

    monkeypatch.setattr("chairlift.config.settings.load", told)
    monkeypatch.setattr("chairlift.run.main.load", told)
    lines = tmp_path / "in.jsonl"
    lines.touch()
    # The first process of a container does not hear what it does not handle.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            main([command] if command == "serve" else [command, str(lines), "-o", str(tmp_path / "out.jsonl")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stop, says in ((KeyboardInterrupt(), "stopped"), (KeyboardInterrupt("some is kept"), "some is kept")):

        def stopped(args: argparse.Namespace, stop: KeyboardInterrupt = stop) -> int:
            raise stop

        monkeypatch.setattr("chairlift.config.keys.keys_command", stopped)
        assert main(["keys", "new"]) == 130
        assert capsys.readouterr().err == f"chairlift: {says}\n"


def test_what_nobody_reads_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # It is closed at the end, with what it still holds.
    with os.fdopen(writing, "w") as out, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", out)
        assert main(["keys", "new"]) == 1


def test_the_guide_of_other_servers_flags_is_true() -> None:
    """Flags of the right column are ours; of those on the left each is, or is refused with a hint."""
    text = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    seen = 0
    for theirs, here in rows:
        for flag in re.findall(r"(?<!\w)--([a-z][a-z-]+)", here):
            assert flag.replace("-", "_") in FIELDS, flag
        for flag in re.findall(r"(?<!\w)--([a-z][a-z-]+)", theirs):
            seen += 1
            assert flag.replace("-", "_") in FIELDS or hint(flag, FIELDS, str), flag
    assert seen > 60


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there pathlib takes what is hidden for nothing")
@pytest.mark.parametrize("hidden", ["chairlift.toml", "model", "cache"])
def test_places_that_can_not_be_looked_at_are_said(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = Path.stat

    def stat(self: Path, **settings: Any) -> os.stat_result:
        # As the system answers those who are not root.
        if hidden in self.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **settings)

    monkeypatch.setattr(Path, "stat", stat)
    model = tmp_path / ("model.gguf" if hidden == "cache" else "model")
    with pytest.raises(ConfigError, match=rf"{hidden}.* can't be looked at: Permission denied"):
        load({"model": str(model)}, {}, tmp_path, "m")


def test_a_name_that_no_system_takes_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be looked at: File name too long|no folder or file here"):
        load({"model": 300 * "a"}, {}, tmp_path, "m")
