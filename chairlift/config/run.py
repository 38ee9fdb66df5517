"""The flags of `chairlift run`, beside those of its models."""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from chairlift.config.flags import add_model_flags, dashed
from chairlift.errors import ConfigError

Order = Literal["file", "prefix", "length"]
Format = Literal["batch", "jsonl", "csv", "parquet"]

_SUFFIXES: dict[str, Format] = {".csv": "csv", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip"}


class RunConfig(msgspec.Struct, kw_only=True):
    """One `chairlift run`. Raises ConfigError naming the flag.

    `prompt_field` makes requests of rows: of that field of JSON lines, or that column of a table. `order` and
    `concurrency` follow from the model if left out.
    """

    input: Path
    output: Path
    errors: Path
    format: Format
    prompt_field: str | None = None
    id_field: str | None = None
    chat: bool = False
    params: dict[str, Any] = {}
    order: Order | None = None
    concurrency: int | None = None
    max_attempts: int = 5
    max_failures: int | None = None
    overwrite: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        """Refuse contradictions, and inputs that could not be taken up again."""
        if str(self.input) == "-":
            raise ConfigError("INPUT must be a file: what comes from a pipe can't be read again after a crash")
        if self.input.suffix in _COMPRESSED:
            raise ConfigError(
                f"{self.input} is compressed; unpack it first: a job must be able to go on amid its input"
            )
        if len({path.absolute() for path in (self.input, self.output, self.errors, self.state)}) < 4:
            raise ConfigError(
                f"INPUT, OUTPUT, --errors and {self.state}, which says how far the run is, must be different files"
            )
        if self.format == "batch":
            given = {"--id-field": self.id_field, "--chat": self.chat, "--param": self.params}
            for flag, value in given.items():
                if value:
                    raise ConfigError(
                        f"{flag} goes with --prompt-field; lines in the batch format bring whole requests"
                    )
        elif self.prompt_field is None:
            raise ConfigError(f"--prompt-field must say which field of {self.input} is the prompt or text")
        for name, least in (("concurrency", 1), ("max_attempts", 1), ("max_failures", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{dashed(name)} must be at least {least}, got {value}")

    @property
    def state(self) -> Path:
        """The file that says how far the job is, as long as it is not done."""
        return self.output.with_name(self.output.name + ".job")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift run`."""
    add = parser.add_argument
    add(
        "input",
        metavar="INPUT",
        type=Path,
        help="OpenAI batch lines; or rows of JSON, CSV or Parquet, with --prompt-field",
    )
    add(
        "-o",
        "--output",
        metavar="OUTPUT",
        type=Path,
        required=True,
        help="result lines; OUTPUT.job until all are there",
    )
    add(
        "--errors", metavar="FILE", type=Path, help="lines that failed (default: OUTPUT with .errors before its suffix)"
    )
    add(
        "--format",
        choices=("batch", "jsonl", "csv", "parquet"),
        help="of INPUT (default: by its suffix and --prompt-field)",
    )
    rows = parser.add_argument_group("rows")
    add = rows.add_argument
    add("--prompt-field", metavar="NAME", help="the field or column that is the prompt, the text, or the instance")
    add("--id-field", metavar="NAME", help="the field or column that is the custom_id (default: line-N)")
    add("--chat", action="store_true", help="send each prompt as a user's message, through the chat template")
    add("--param", metavar="NAME=JSON", action="append", default=[], help="another field of each body: max_tokens=64")
    job = parser.add_argument_group("job")
    add = job.add_argument
    add(
        "--order", choices=("file", "prefix", "length"), help="of lines within a window of 1024 (default: by the model)"
    )
    add("--concurrency", metavar="N", type=int, help="lines under way at once (default: by the model)")
    add(
        "--max-attempts",
        metavar="N",
        type=int,
        default=5,
        help="how often a line is tried that ends in a server's error",
    )
    add("--max-failures", metavar="N", type=int, help="stop when more than N lines have failed (default: never)")
    add("--overwrite", action="store_true", help="replace an OUTPUT that is there")
    add("--restart", action="store_true", help="begin anew, though OUTPUT.job could be taken up")
    add_model_flags(parser)


def run_config(args: argparse.Namespace) -> RunConfig:
    """The settings of a run from its flags."""
    path: Path = args.input
    output: Path = args.output
    format_: Format = args.format or _SUFFIXES.get(path.suffix) or ("batch" if args.prompt_field is None else "jsonl")
    if format_ == "batch" and args.prompt_field is not None:
        raise ConfigError("--prompt-field is for rows; lines in the batch format bring whole requests")
    return RunConfig(
        input=path,
        output=output,
        errors=args.errors or output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}"),
        format=format_,
        prompt_field=args.prompt_field,
        id_field=args.id_field,
        chat=args.chat,
        params=dict(_param(text) for text in args.param),
        order=args.order,
        concurrency=args.concurrency,
        max_attempts=args.max_attempts,
        max_failures=args.max_failures,
        overwrite=args.overwrite,
        restart=args.restart,
    )


def _param(text: str) -> tuple[str, Any]:
    """NAME=JSON; what is no JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--param takes NAME=JSON, got {text!r}")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value
