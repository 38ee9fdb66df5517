"""Deciding for models that answer in one call: who shares a batch, when it leaves, what follows from a failure."""
