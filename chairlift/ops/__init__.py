"""Operations on tensors: the plain-torch truth and its faster equals."""
