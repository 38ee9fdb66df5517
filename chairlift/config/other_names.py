"""Names of settings that there are not: misspelt, or those that other servers have for the same thing."""

import difflib
from collections.abc import Callable, Iterable

# What vLLM, text-embeddings-inference, Triton and llama.cpp call settings that we have under another name.
OURS = {
    "gpu_memory_utilization": "kv_cache_gb",
    "num_gpu_blocks_override": "kv_cache_gb",
    "uvicorn_log_level": "log_level",
    "task": "kind",
    "max_concurrent_requests": "max_waiting",
    "max_client_batch_size": "max_waiting",
    "max_batch_requests": "max_batch_size",
    "payload_limit": "max_body_bytes",
    "cors_allow_origin": "allowed_origins",
    "hostname": "host",
    "http_address": "host",
    "grpc_address": "host",
    "http_port": "port",
    "log_verbose": "log_level",
    "exit_timeout_secs": "drain_timeout_s",
    "max_queue_delay_microseconds": "max_wait_ms",
    "preferred_batch_size": "max_batch_size",
    "ctx_size": "max_model_len",
    "parallel": "max_num_seqs",
    "threads": "num_threads",
    "alias": "served_model_name",
    "allow_client_shm": "shared_memory",
    "ubatch_size": "max_num_batched_tokens",
    "cache_type_k": "kv_cache_dtype",
    "cache_type_v": "kv_cache_dtype",
    "n_gpu_layers": "device",
    "ssl_certfile": "tls_cert",
    "ssl_cert_file": "tls_cert",
    "ssl_keyfile": "tls_key",
    "ssl_key_file": "tls_key",
    "ssl_ca_certs": "tls_ca",
    "runner": "kind",
    "model_impl": "implementation",
    "tool_call_parser": "tool_dialect",
    "otlp_traces_endpoint": "otlp_endpoint",
}

_ONE_DEVICE = (
    "a model runs on one device; for more requests at once start more servers, or more `instances` of an encoder"
)
_CACHE = "the variable HF_HUB_CACHE says where models of the Hub are kept"
_TOKEN = "the variable HF_TOKEN holds the Hub's token"
_FIRST = "name the model as the first argument of `chairlift serve`, or as the key `model` of chairlift.toml"
_TOOLS = "not needed, because every model whose template knows tools takes them"
_LORA = "adapters are not implemented; merge them into the weights"
_METRICS = "metrics are at /metrics of the server's own port"
_FOLDER = "that follows from the model's folder"

# What they have and we do not, with what there is instead or why there need be nothing.
INSTEAD = {
    "override_generation_config": "say it in the generation_config.json of the model's folder",
    "model": _FIRST,
    "model_id": _FIRST,
    "model_repository": "give each model a table [models.NAME] in chairlift.toml",
    "model_store": "give each model a table [models.NAME] in chairlift.toml",
    "model_control_mode": "`model_control` lets clients load and unload the models of chairlift.toml",
    "load_model": "models of chairlift.toml are loaded when the server starts",
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "enforce_eager": "not needed, because decodes are recorded as CUDA graphs only where they can be",
    "max_seq_len_to_capture": "not needed, because a CUDA graph is recorded for any length that comes",
    "swap_space": "not needed, because a preempted sequence is computed anew, not swapped out",
    "cpu_offload_gb": "weights are not offloaded; `quantization` int8 halves them",
    "enable_chunked_prefill": "not needed, because long prompts always go in chunks of `max_num_batched_tokens`",
    "disable_log_requests": "not needed, because requests are not logged",
    "disable_log_stats": f"not needed, because nothing is logged regularly: {_METRICS}",
    "scheduling_policy": "not needed, because every request may bring a `priority`",
    "trust_remote_code": "code in a model's folder is never run",
    "tokenizer": _FOLDER,
    "tokenizer_mode": _FOLDER,
    "chat_template": _FOLDER,
    "pooling": _FOLDER,
    "default_prompt": _FOLDER,
    "default_prompt_name": _FOLDER,
    "download_dir": _CACHE,
    "load_format": "weights are read from safetensors",
    "huggingface_hub_cache": _CACHE,
    "hf_token": _TOKEN,
    "hf_api_token": _TOKEN,
    "max_logprobs": "not a setting: a request may ask for 20",
    "enable_auto_tool_choice": _TOOLS,
    "reasoning_parser": "not needed, because the chat template tells how a model reasons; else `tool_dialect` does",
    "limit_mm_per_prompt": "not needed, because only texts go in",
    "enable_lora": _LORA,
    "lora_modules": _LORA,
    "cont_batching": "not needed, because `strategy` is continuous by default",
    "embeddings": "what a folder is follows from its files; `kind` encoder has a language model embed",
    "reranking": "what a folder is follows from its files",
    "speculative_config": "speculative decoding is not implemented",
    "speculative_model": "speculative decoding is not implemented",
    "tokenization_workers": "not needed, because texts are tokenized in the server's own threads",
    "auto_truncate": "not a setting: each request says whether its texts may be cut",
    "prometheus_port": _METRICS,
    "metrics_port": _METRICS,
    "allow_metrics": f"not needed, because {_METRICS}",
    "strict_model_config": "not needed, because inputs and outputs are read from the model itself",
    "backend_directory": "not needed, because what a model is follows from its files",
    "backend_config": "a model's settings are in its table [models.NAME] of chairlift.toml",
    "http_thread_count": "not needed, because one event loop serves all connections",
    "pinned_memory_pool_byte_size": "not needed, because tensors are not staged in pinned memory",
    "cuda_memory_pool_byte_size": "not needed, because PyTorch keeps its own pool",
}


def hint(name: str, known: Iterable[str], shown: Callable[[str], str], least: float = 0.6) -> str:
    """What may be said of a setting that there is not, to follow its name; empty if nobody can tell what was meant.

    `known` are those that there are, and `shown` spells one as it would have to be given. `least` is how alike a
    misspelt name must be, from 0 to 1.
    """
    name, known = name.replace("-", "_"), set(known)
    if OURS.get(name) in known:
        return f"; that is {shown(OURS[name])} here"
    if name in INSTEAD:
        return f"; leave it out: {INSTEAD[name]}"
    close = difflib.get_close_matches(name, sorted(known), 1, least)
    return f"; did you mean {shown(close[0])}?" if close else ""
