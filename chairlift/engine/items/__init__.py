"""The loop around the scheduler of items, and the processes and threads that compute batches."""
