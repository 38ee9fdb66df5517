"""Telling that nothing more can be computed in this process: after most of its errors CUDA fails at all it is asked."""

import sys

from chairlift.runners.out_of_memory import is_out_of_memory, text_of


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception is one of CUDA's that only another process makes good for; not that memory ran out.

    CUDA does not say which of its errors spare the process, so none is thought to.
    """
    # Whoever has torch's own class has loaded torch. Of older errors, and of libraries', only the text tells.
    own = getattr(sys.modules.get("torch"), "AcceleratorError", ())
    of_cuda = isinstance(error, own) or (isinstance(error, RuntimeError) and "CUDA error" in text_of(error))
    return of_cuda and not is_out_of_memory(error)
