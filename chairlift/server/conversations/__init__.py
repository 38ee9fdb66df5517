"""What the OpenAI, Anthropic and Responses routes share: a conversation, and its reply step by step."""
