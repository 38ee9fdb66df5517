"""Encoders of the BERT family: embeddings, classification and reranking, with no padding."""
