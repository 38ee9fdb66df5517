"""The loop around the scheduler of sequences: in a worker process, or in the calling one."""
