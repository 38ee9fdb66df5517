"""Decoder-only language models: from a Hugging Face folder to sampled tokens."""
