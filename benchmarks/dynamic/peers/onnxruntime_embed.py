"""ONNX Runtime's embedding rate with padded batches, sorted by length: run by an environment of its own.

python benchmarks/dynamic/peers/onnxruntime_embed.py MODEL --work DIR, in an environment with torch, transformers, onnx
and onnxruntime. The model is exported to DIR and fused by ONNX Runtime's own optimizer; `--int8` quantizes it
dynamically. Prints one line of JSON for each batch size.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import texts


def main() -> None:
    parser = argparse.ArgumentParser()
    texts.add_arguments(parser)
    parser.add_argument("--work", type=Path, required=True, help="where the exported files go")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--int8", action="store_true")
    args = parser.parse_args()
    import onnxruntime
    from tokenizers import Tokenizer

    session = onnxruntime.InferenceSession(export(args.model, args.work, args.int8), _options(onnxruntime))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    strings, lengths = texts.make_texts(args.model, args.texts)
    for batch_size in args.batch_sizes:
        best = float("inf")
        for _ in range(args.rounds):
            began = time.perf_counter()
            vectors = embed(session, tokenizer, strings, batch_size)
            best = min(best, time.perf_counter() - began)
        report = {"engine": "onnxruntime", "dtype": "int8" if args.int8 else "float32", "batch_size": batch_size}
        report |= {"tokens": sum(lengths), "seconds": round(best, 3), "tok_s": round(sum(lengths) / best)}
        print(json.dumps(report), flush=True)
    if args.vectors:
        np.save(args.vectors, vectors)


def _options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    return options


def embed(session: Any, tokenizer: Any, strings: list[str], batch_size: int) -> np.ndarray:
    """Mean-pooled, normalized vectors in the order of the texts."""
    order = sorted(range(len(strings)), key=lambda index: -len(strings[index]))
    vectors = np.empty((len(strings), 384), np.float32)
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        batch = tokenizer.encode_batch_fast([strings[index] for index in some])
        ids = np.array([one.ids for one in batch], np.int64)
        mask = np.array([one.attention_mask for one in batch], np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = session.run(None, inputs)[0]
        pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        vectors[some] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    return vectors


def export(model: Path, work: Path, int8: bool) -> str:
    """Return the file to run, made on the first call."""
    work.mkdir(parents=True, exist_ok=True)
    plain, fused, rounded = work / "model.onnx", work / "fused.onnx", work / "int8.onnx"
    if not plain.exists():
        import torch
        from transformers import AutoModel

        reference = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        class States(torch.nn.Module):
            def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
                return reference(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

        names = ["input_ids", "attention_mask", "token_type_ids"]
        inputs = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
        axes = {name: {0: "batch", 1: "tokens"} for name in [*names, "states"]}
        reference.requires_grad_(False)
        torch.onnx.export(States(), inputs, str(plain), input_names=names, output_names=["states"],
                          dynamic_axes=axes, dynamo=False)  # fmt: skip
    if not fused.exists():
        from onnxruntime.transformers import optimizer

        optimized = optimizer.optimize_model(str(plain), "bert", num_heads=12, hidden_size=384)
        print(json.dumps({"fused": optimized.get_fused_operator_statistics()}), file=sys.stderr)
        optimized.save_model_to_file(str(fused))
    if int8 and not rounded.exists():
        from onnx import TensorProto
        from onnxruntime.quantization import quantize_dynamic

        # ONNX cannot tell what the fused operators return.
        quantize_dynamic(str(fused), str(rounded), extra_options={"DefaultTensorType": TensorProto.FLOAT})
    return str(rounded if int8 else fused)


if __name__ == "__main__":
    main()
