"""Text in, tokens out, and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from chairlift.text.detokenize import TextDelta, TextStream
from chairlift.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream", "Tokenizer"]
