"""The OpenAI Files and Batches API behind its routes: files on the disk, and batches that run in the background."""
