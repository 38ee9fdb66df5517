"""The server: its routes (`routes.py`) and what answers them, the models behind them, files and batches, and metrics.

`front.py` is its process, which never imports torch: models live in worker processes.
"""
