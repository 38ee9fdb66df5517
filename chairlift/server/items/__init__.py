"""The routes of models that answer in one call: embeddings, rerank, TEI, KServe predictions."""
