"""What the files of a GGUF model in several parts are called, as llama.cpp's tools do it."""

import re

# What all are called, which this is, from 1 on, and how many there are.
GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_name(base: str, number: int, count: int) -> str:
    """The name of one part."""
    return f"{base}-{number:05}-of-{count:05}.gguf"
