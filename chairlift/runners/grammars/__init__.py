"""Grammars beside the steps of a model: compiled, followed, and turned into the tokens that may come next."""
