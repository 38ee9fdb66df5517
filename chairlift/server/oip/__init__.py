"""The Open Inference Protocol v2 over HTTP and gRPC, and KServe's v1 predictions."""
