"""The Open Inference Protocol v2, with the extensions that Triton's clients use."""
