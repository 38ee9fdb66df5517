"""What a peer's server is to be like, from the environment: SLEEP_ALPHA_MS, SLEEP_BETA_MS, and its own settings."""

import os

from sleeper import MOST as MOST
from sleeper import sleep as sleep


def setting(name: str) -> float:
    """A number that must be there."""
    return float(os.environ[f"SLEEP_{name}"])


ALPHA_MS, BETA_MS = setting("ALPHA_MS"), setting("BETA_MS")
WAIT_MS = setting("WAIT_MS")
# How long a request may take or wait, and how many may wait, where a server has such limits; 0 is its default.
LIMIT_MS, MAX_WAITING = setting("LIMIT_MS"), int(setting("MAX_WAITING"))
PORT = int(setting("PORT"))
