"""GGUF files: one file with a model's tensors, its tokenizer and what else it is, as llama.cpp reads it."""
