"""Triton, POST /v2/models/sleep/infer: python triton_server.py, in an environment with nvidia-pytriton.

The environment must be of the Debian package's python3.11: Triton's own interpreter clashes with builds of others.
"""

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.triton import Triton, TritonConfig
from server_process import free_port
from settings import ALPHA_MS, BETA_MS, LIMIT_MS, MAX_WAITING, MOST, PORT, WAIT_MS, sleep


@batch
def compute(x: np.ndarray) -> dict[str, np.ndarray]:
    """Compute one batch."""
    sleep(ALPHA_MS, BETA_MS, len(x))
    return {"y": x.sum(axis=1, keepdims=True)}


if __name__ == "__main__":
    policy = QueuePolicy(
        timeout_action=TimeoutAction.REJECT,
        default_timeout_microseconds=int(LIMIT_MS * 1000),
        max_queue_size=MAX_WAITING,
    )
    batcher = DynamicBatcher(max_queue_delay_microseconds=int(WAIT_MS * 1000), default_queue_policy=policy)
    config = TritonConfig(http_port=PORT, grpc_port=free_port(), metrics_port=free_port(), log_verbose=0)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="sleep",
            infer_func=compute,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(4,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(1,))],
            config=ModelConfig(max_batch_size=MOST, batcher=batcher),
        )
        triton.serve()
