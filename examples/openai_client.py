"""Stream a chat from a running server (`chairlift serve`): python examples/openai_client.py "What can you do?" """

import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = sys.argv[1] if len(sys.argv) > 1 else "What is continuous batching?"
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
