"""The OpenAI routes of language models: completions and chat."""
