"""How many threads a model computes with."""

import torch

from chairlift.runners.host_cpus import usable_cpus


def set_threads(number: int | None) -> None:
    """Compute with so many threads; None: as many as torch takes by itself, a core each, if this process may."""
    if number is None:
        number = usable_cpus()
        # Torch sees which cores there are, but not how much of their time a container has.
        if number >= torch.get_num_threads():
            return
    torch.set_num_threads(number)
