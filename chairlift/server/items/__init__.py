"""Routes of models that answer in one call: embeddings, rerank, text-embeddings-inference, KServe predictions."""
