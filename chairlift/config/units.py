"""Units: settings are in milliseconds, as people write them, and all that reads them counts in seconds."""


def seconds(milliseconds: float | None) -> float | None:
    """Return a setting in seconds; None stays what it is."""
    return None if milliseconds is None else milliseconds / 1000
