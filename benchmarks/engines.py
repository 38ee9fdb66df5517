"""How each engine is started, in process and as a server, with the same limits for all.

64 sequences at most, 2048 tokens of context where it must be said, no prefix caching, all cores; else its defaults, but
for what `SETTINGS` says. Only of servers a sweep looks for better settings (compare_serving.py).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from peer_versions import binary_version, package_versions

PEERS = Path(__file__).parent / "peers"
BF16, INT8, INT4 = "bf16", "8 bit", "4 bit"
SERVED_NAME = "bench"
OURS, BEFORE = "Chairlift", "Chairlift before"
# What is set of an engine in process, besides the limits that all have; no sweep looked for it.
SETTINGS = {
    OURS: "its defaults",
    "vLLM": "its defaults, with what its documentation advises for a CPU",
    "OpenVINO GenAI": "512 tokens a step, prompts split, 2 GB of cache",
    "llama.cpp": "batches of 512 tokens (-b 512 -ub 512)",
}


class Engine(NamedTuple):
    """An engine with a model of one precision.

    `program` takes MODEL and WORKLOADS and prints a JSON line for each workload; `server` takes --port, or is empty if
    there is none. `ready` is the path that answers 200 once requests are taken. `variants` are more flags of the
    server, among which a sweep finds the best.
    """

    name: str
    precision: str
    program: tuple[str, ...]
    model: str
    settings: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    ready: str = "/health"
    env: dict[str, str] = {}
    variants: tuple[tuple[str, ...], ...] = ()

    def offline(self, workloads: list[str], repeat: int) -> list[str]:
        """The command that measures workloads in process."""
        return [*self.program, self.model, ",".join(workloads), *self.settings, "--repeat", str(repeat)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which engines there are; one whose options are missing is left out."""
    parser.add_argument("model", nargs="?", help="a Hugging Face folder, for Chairlift and vLLM")
    parser.add_argument("--settings", nargs="*", default=[], metavar="SETTING=VALUE", help="Chairlift's, as JSON")
    parser.add_argument("--int8", nargs="*", default=['quantization="int8"', 'kv_cache_dtype="int8"'],
                        metavar="SETTING=VALUE",
                        help="more of them for 8 bit; none leaves Chairlift's 8 bit out")  # fmt: skip
    parser.add_argument("--int4", nargs="*", default=['quantization="int4"', 'kv_cache_dtype="int8"'],
                        metavar="SETTING=VALUE",
                        help="more of them for 4 bit; none leaves Chairlift's 4 bit out")  # fmt: skip
    parser.add_argument("--before", metavar="CHECKOUT",
                        help="another checkout's Chairlift, its native library built, in the same rounds")  # fmt: skip
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--openvino", metavar="PYTHON", help="the same with OpenVINO GenAI")
    parser.add_argument("--openvino-model", metavar="DIR", help="the exported model, float16, which runs as bfloat16")
    parser.add_argument("--openvino-int8", metavar="DIR", help="the exported model, int8")
    parser.add_argument("--openvino-int4", metavar="DIR", help="the exported model, int4")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--llama-build", metavar="WORDS", help="how that was built, such as: without AMX")
    parser.add_argument("--gguf", metavar="FILE", help="bf16")
    parser.add_argument("--gguf-int8", metavar="FILE", help="Q8_0")
    parser.add_argument("--gguf-int4", metavar="FILE", help="Q4_0, which llama.cpp lays out anew for what multiplies")


def chosen(args: argparse.Namespace) -> list[Engine]:
    """The engines that the options name, Chairlift first."""
    engines = [_chairlift(args.model, BF16, args.settings)]
    rounded = ((INT8, args.int8), (INT4, args.int4))
    engines += [_chairlift(args.model, each, [*args.settings, *more]) for each, more in rounded if more]
    if args.before:
        engines += [_before(engine, args.before) for engine in engines]
    if args.vllm:
        engines.append(_vllm(args.vllm, args.model))
    if args.openvino:
        program = (args.openvino, str(PEERS / "openvino_engine.py"))
        models = ((BF16, args.openvino_model), (INT8, args.openvino_int8), (INT4, args.openvino_int4))
        engines += [Engine("OpenVINO GenAI", precision, program, model) for precision, model in models if model]
    if args.llama_server:
        models = ((BF16, args.gguf), (INT8, args.gguf_int8), (INT4, args.gguf_int4))
        engines += [_llama(args.llama_server, precision, model) for precision, model in models if model]
    return engines


def versions(args: argparse.Namespace) -> dict[str, str]:
    """Those of the peers that the options name."""
    found = package_versions({"vLLM": (args.vllm, "vllm"), "OpenVINO GenAI": (args.openvino, "openvino-genai")})
    return found | ({"llama.cpp": binary_version(args.llama_server)} if args.llama_server else {})


def llama_command(binary: str, gguf: str) -> tuple[str, ...]:
    """llama-server with 64 slots of 1024 tokens; more threads than cores would slow it down."""
    slots = ("-c", "65536", "-np", "64", "-b", "512", "-ub", "512", "-t", str(os.cpu_count()))
    return (binary, "-m", gguf, *slots, "--no-cache-prompt", "--alias", SERVED_NAME)


def _chairlift(model: str, precision: str, settings: list[str]) -> Engine:
    defaults = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_gb": 2, "enable_prefix_caching": False}
    values = defaults | {name: json.loads(value) for name, _, value in (s.partition("=") for s in settings)}
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return Engine(
        name=OURS,
        precision=precision,
        program=(sys.executable, str(PEERS.parent / "offline.py")),
        model=model,
        settings=(*settings, "--roofline"),
        server=(sys.executable, "-m", "chairlift.cli", "serve", model, "--served-model-name", SERVED_NAME, *flags),
        ready="/health/ready",
        variants=(("--max-num-batched-tokens", "256"), ("--target-itl-ms", "60"), ("--target-itl-ms", "100")),
    )


def _before(engine: Engine, checkout: str) -> Engine:
    """The same program, with the package of another checkout; the machine's limit is measured once, by this one."""
    settings = tuple(setting for setting in engine.settings if setting != "--roofline")
    path = {"PYTHONPATH": str(Path(checkout).resolve())}
    return engine._replace(name=BEFORE, settings=settings, server=(), env=path)


def _vllm(python: str, model: str) -> Engine:
    limits = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching")
    module = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", SERVED_NAME)
    return Engine(
        name="vLLM",
        precision=BF16,
        program=(python, str(PEERS / "vllm_engine.py")),
        model=model,
        server=(*module, *limits, "--disable-uvicorn-access-log"),
        env=vllm_environment(Path(python)),
        variants=tuple(("--max-num-batched-tokens", str(tokens)) for tokens in (256, 512, 1024, 4096)),
    )


def vllm_environment(python: Path) -> dict[str, str]:
    """What vLLM's documentation advises for a CPU: tcmalloc and Intel's OpenMP, threads bound to all cores."""
    libraries = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
        *sorted(python.parents[1].rglob("libiomp5.so*"))[:1],
    ]
    return {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1",
    }


def _llama(binary: str, precision: str, gguf: str) -> Engine:
    program = (sys.executable, str(PEERS / "llama_engine.py"), "--binary", binary)
    batches = tuple(("-b", str(tokens), "-ub", str(tokens)) for tokens in (128, 256, 1024))
    return Engine("llama.cpp", precision, program, gguf, server=llama_command(binary, gguf), variants=batches)
