"""A layer's norms, by what the files call them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What the files call a layer's norms: of what attention and the MLP are given (pre) and of what they give (post).

    None where there is none. What they give is normalized before it is added to the residual.
    """

    attention_pre: str | None = "input_layernorm"
    attention_post: str | None = None
    mlp_pre: str | None = "post_attention_layernorm"
    mlp_post: str | None = None


BEFORE = LayerNorms()
