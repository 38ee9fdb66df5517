"""The loop around the core: worker process, supervisor, in-process engine."""
