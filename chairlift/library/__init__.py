"""The library: a model in the process of its caller, and functions whose calls are batched."""
