"""The HTTP front: OpenAI routes, health, metrics. It never imports torch; the model lives in a worker process."""
