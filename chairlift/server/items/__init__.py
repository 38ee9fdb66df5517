"""Routes of models that answer in one call: embeddings, pooling, rerank, text-embeddings-inference."""
