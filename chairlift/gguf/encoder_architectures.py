"""What GGUF files call encoders, their tensors and settings, and what folders of Hugging Face call the same."""

from chairlift.gguf.encoder_architecture import EncoderArchitecture

HEAD, PROJECTOR = "cls", "cls.output"
_NORMS = {"attn_output_norm": "attention.output.LayerNorm", "layer_output_norm": "output.LayerNorm"}
_BERT_ATTENTION = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
}
_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}

ENCODERS: dict[str, EncoderArchitecture] = {
    # BERT, and RoBERTa, XLM-R and DistilBERT, too: of their tables converters cut off the rows before the first
    # position, so that nothing else is left that they compute.
    "bert": EncoderArchitecture(
        "bert",
        names=_BERT_ATTENTION | _NORMS | {"ffn_up": "intermediate.dense", "ffn_down": "output.dense"},
        whole=_EMBEDDINGS
        | {"position_embd": "embeddings.position_embeddings", HEAD: "pooler.dense", PROJECTOR: "classifier"},
        # No file says which activation there is: it is BERT's own, where llama.cpp has what is near it.
        fields={"hidden_act": "gelu"},
    ),
}
