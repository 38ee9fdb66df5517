"""The part that decides: pure, deterministic, standard library and msgspec only."""
