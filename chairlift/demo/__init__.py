"""The small model that ships with Chairlift, so that it can be tried without a download."""

from pathlib import Path


def demo_path() -> Path:
    """The demo model's folder: a Hugging Face folder like any other."""
    return Path(__file__).parent / "model"
