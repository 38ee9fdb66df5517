"""Deciding for models that generate token by token: who runs in a step, and with how many tokens."""
