"""Embeddings, classification and reranking, with no padding: by encoders of the BERT family, and by decoders."""
