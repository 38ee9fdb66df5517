"""The flags of `chairlift serve`: one for each setting."""

import argparse
import types
import typing
from typing import Any

import msgspec

from chairlift.config.choices import choices
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.core.sequences.strategy import STRATEGIES, readers_of

HELP = {
    "model": "a Hugging Face folder, a name of the Hub, a .gguf or .onnx file, or module:Class or file.py:Class "
    "(default: the demo model)",
    "revision": "branch, tag or commit of a model of the Hub (default: main)",
    "served_model_name": "the name that clients ask for (default: that of the folder, file or class)",
    "dtype": "type of weights and activations; auto is bfloat16 for a folder of bfloat16, and else float32 "
    "(docs/configuration.md has the exceptions)",
    "device": "where the model runs",
    "ops": "native kernels, or the plain reference",
    "implementation": "native kernels, or transformers' modules with our attention; auto is native where they can",
    "strategy": "when a waiting request is admitted",
    "batch_size": "requests in a full batch",
    "max_wait_ms": "how long the oldest waits for a full batch: language models (default: 5), others (0)",
    "max_num_seqs": "sequences that may run at once",
    "max_num_batched_tokens": "tokens in one step",
    "step_time_ms": "milliseconds that a step with prompts may take while others stream; 0 is any time",
    "target_itl_ms": "milliseconds that a step may take, by which prompts are cut (default: no target)",
    "target_ttft_ms": "milliseconds to the first token, beyond which a request is refused (default: no target)",
    "background_step_ms": "milliseconds that a step with background requests may take, since live ones wait for it",
    "order": "who of those who wait is next: the first that came, or the shortest (prompt and max_tokens, or size)",
    "order_ageing_ms": "shortest: milliseconds of waiting that a token, or a unit of an item's size, is worth",
    "priority_ageing_ms": "milliseconds of waiting that a level of priority is worth",
    "max_model_len": "prompt and output tokens of one sequence (default: the model's max_position_embeddings)",
    "block_size": "tokens in one KV block",
    "expected_input_tokens": "tokens of a prompt, as you expect them: for KV memory, with the next",
    "expected_output_tokens": "tokens of an answer, as you expect them: for predictions until some were seen",
    "kv_cache_gb": "memory for the KV cache (default: at most 4 GiB, and two fifths of what is free)",
    "quantization": "int8 halves bfloat16 weights, int4 halves those again; both round what they multiply to 8 bits",
    "kv_cache_dtype": "int8 halves a bfloat16 cache and the time to read it, rounding K and V; auto is the dtype",
    "enable_prefix_caching": "share the KV blocks of common prompt prefixes",
    "generation_config": "auto: how to sample, where requests don't say, is in the folder's generation_config.json",
    "tool_dialect": "how the model writes calls of tools; auto is what its chat template shows",
    "seed": "of requests that bring none",
    "num_threads": "CPU threads of the worker (default: all cores that it may use, or 1 for a model under 32 MB)",
    "auto": "let the server turn these settings as its traffic asks for (default: only with a target)",
    "heartbeat_timeout_s": "seconds that a worker's process may be stopped before another takes its place",
    "step_timeout_s": "seconds, and 20 times the predicted time, after which a step counts as hung",
    "kind": "what the model is; auto is what its name and files say; encoder has a language model's folder embed",
    "max_batch_size": "items in one call (default: what the model says, or 32)",
    "max_batch_tokens": "tokens in one call",
    "max_queue_ms": "predicted time of the work that waits, beyond which a request gets 429 (default: any)",
    "target_latency_ms": "from arrival to answer; batch size and wait then follow from measured times and arrivals",
    "timeout_ms": "the deadline of requests that bring none (default: none)",
    "call_timeout_s": "when a call counts as hung, and its process is ended",
    "retries": "how often a failed call's items are tried again",
    "bisect": "find the item that makes a call fail by trying halves",
    "instances": "worker processes of the model",
    "standby": "one more worker, while it is found out which item ends or hangs them: auto if memory allows, or always",
    "warm_up_sizes": "batch sizes to run before the model is ready, as JSON (default: powers of two)",
    "outputs": "outputs of an ONNX model to compute, as a JSON list (default: all)",
    "options": "keywords for a Python class's constructor, as JSON",
    "host": "the address to listen on; 0.0.0.0 opens the server to the network",
    "port": "the port to listen on; 0 takes any free one",
    "grpc_port": "also serve the Open Inference Protocol over gRPC there (default: no gRPC)",
    "api_key": "ask for 'Authorization: Bearer KEY' (better set as CHAIRLIFT_API_KEY than as a flag)",
    "api_keys": "a file of keys, each with rights and limits, read anew when it changes; see chairlift keys",
    "model_control": "let whoever may use the server load and unload models, where no keys are asked for",
    "model_aliases": 'further names that clients may send: JSON, {"gpt-4o": "demo"}',
    "shared_memory": "let clients on this machine pass tensors in memory that they share with the server",
    "show_cached_tokens": "say in usage how much of a prompt came from the prefix cache",
    "tls_cert": "serve HTTPS, and gRPC over TLS, with the PEM certificate (and its chain) in this file",
    "tls_key": "the file with the certificate's key, without a passphrase",
    "tls_ca": "ask clients for a certificate, signed by one of the PEM certificates in this file",
    "allowed_origins": 'sites whose pages may use the server: JSON, ["https://app.example.com"], or ["*"] for all',
    "allowed_hosts": 'names in Host that the server answers to beside its own: JSON, or ["*"] for all',
    "max_waiting": "what may wait, beyond which a request gets 429: sequences (default: 1024) or items (4096)",
    "max_body_bytes": "bytes of a request body",
    "max_tensor_bytes": "bytes of a request body with tensors or instances",
    "max_tensor_json_bytes": "bytes of JSON in such a body, which takes far longer to read than tensors as bytes",
    "max_n": "samples of one request",
    "max_prompts_per_request": "prompts of one completion request",
    "max_stop_strings": "stop strings of one request",
    "max_stop_chars": "characters of one stop string",
    "max_stop_chars_total": "characters of all stop strings of one request",
    "max_buffered_bytes": "bytes of bodies, messages and unsent answers of all connections together",
    "max_connections": "open connections, and gRPC calls under way",
    "max_uploads": "files on their way in at once",
    "body_timeout_s": "seconds that a request body may take to arrive",
    "min_body_rate": "bytes a second that a body or an upload must come at, after its first seconds; 0 for any",
    "write_timeout_s": "seconds without a byte taken, after which a client that does not read is closed",
    "request_timeout_s": "seconds that a request may take in all",
    "keep_alive_s": "seconds that an idle connection is kept",
    "drain_timeout_s": "seconds that running requests get to end after SIGTERM",
    "data_dir": "where files and batches are kept, made when the first one comes; '' turns both off",
    "record": "append a line for each request, without its text, to this file: a trace for chairlift plan and bench",
    "max_record_bytes": "bytes of that file, at which recording stops",
    "otlp_endpoint": "send a span of each request to this OpenTelemetry collector, as http://collector:4318",
    "max_file_bytes": "bytes of an uploaded file",
    "tune_every_s": "seconds between two looks of the tuner at a model's traffic, at least",
    "tune_cpu_share": "of all processors' time, what the tuner may take",
    "max_files_bytes": "bytes of all files together",
    "max_batch_lines": "lines of a batch's input",
    "max_batches": "batches that are not over yet, beyond which a new one gets 429",
    "max_running_batches": "batches of one model whose lines run at once; others wait for their turn",
    "max_stored_responses": "responses kept in memory for each tenant; 0 keeps none",
    "max_stored_bytes": "bytes of all kept responses together",
    "max_background_responses": "responses in the background that a tenant may have under way; beyond it, 429",
    "background_timeout_s": "seconds that a response in the background may take in all",
    "log_level": "how much the server and its worker say",
}

# Their default depends on what the model is.
_BY_KIND = ("max_wait_ms", "max_waiting")
_GROUPS = ((SequenceConfig, "language models"), (ItemConfig, "all other models"), (ServerConfig, "server"))
# What means something to requests that come over no network.
_OFF_LINE = {
    *("max_waiting", "max_body_bytes", "max_tensor_bytes", "max_tensor_json_bytes", "max_n"),
    *("max_prompts_per_request", "drain_timeout_s", "log_level"),
    *("max_stop_strings", "max_stop_chars", "max_stop_chars_total"),
}
# `chairlift run` has a flag of its own of this name; a model's is left to the settings file and the environment.
_TAKEN = {"order"}
# What means something to live requests alone, of which a run has none.
_LIVE = {"timeout_ms", "max_queue_ms", "auto", "background_step_ms"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for every setting; a flag that is not given leaves nothing behind."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=f"{HELP['model']}, or a .toml file")
    # Of commands that serve a model for themselves, not for users.
    parser.add_argument("--own-server", action="store_true", help=argparse.SUPPRESS)
    _add_groups(parser, set())


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The same for models that are not served over a network; the model is a flag as well.

    Left out are `order`, and what such a model has no use for.
    """
    parser.add_argument("--model", default=argparse.SUPPRESS, help=HELP["model"])
    on_line = {field.name for field in msgspec.structs.fields(ServerConfig)} - _OFF_LINE
    _add_groups(parser, on_line | _TAKEN | _LIVE)


def model_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the flags that `add_model_flags` adds, and of no other of the same name."""
    return {name: value for name, value in vars(args).items() if name not in _TAKEN}


def _add_groups(parser: argparse.ArgumentParser, left_out: set[str]) -> None:
    parser.add_argument("--config", metavar="FILE", help="settings file (default: chairlift.toml, if it is there)")
    seen = {"model"} | left_out
    for config, title in _GROUPS:
        group = parser.add_argument_group(title)
        for field in msgspec.structs.fields(config):
            if field.name not in seen:
                seen.add(field.name)
                _add_flag(group, field)


def dashed(name: str) -> str:
    """A setting's name as a flag has it."""
    return name.replace("_", "-")


def _add_flag(group: "argparse._ArgumentGroup", field: msgspec.structs.FieldInfo) -> None:
    kind, default, described = field.type, field.default, described_setting(field.name)
    if default not in (None, (), msgspec.NODEFAULT) and field.name not in _BY_KIND:
        described = f"{described} (default: {default})"
    flag, missing = f"--{dashed(field.name)}", argparse.SUPPRESS
    if kind is bool or bool in typing.get_args(kind):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=missing, help=described)
    elif words := choices(kind):
        group.add_argument(flag, choices=words, default=missing, help=described)
    else:
        group.add_argument(flag, metavar=_metavar(kind), default=missing, help=described)


def described_setting(name: str) -> str:
    """What a setting is for, and of a strategy's own, which strategies those are."""
    if name == "strategy":
        return f"{HELP[name]}: " + "; ".join(f"{word}: {strategy.about}" for word, strategy in STRATEGIES.items())
    strategies = readers_of(name)
    return f"{' and '.join(strategies)}: {HELP[name]}" if strategies else HELP[name]


def holds_json(kind: Any) -> bool:
    """Whether a setting of this type is more than a word or a number, so that text must spell it as JSON."""
    return any(typing.get_origin(part) in (dict, tuple) for part in (kind, *typing.get_args(kind)))


def _metavar(kind: Any) -> str:
    if holds_json(kind):
        return "JSON"
    inner = [part for part in typing.get_args(kind) if part is not types.NoneType] or [kind]
    return {int: "N", float: "X", str: "TEXT"}[inner[0]]
