"""Models by their names on the Hugging Face Hub: which files they need, and having them here, whole."""
