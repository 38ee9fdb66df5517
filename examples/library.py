"""Chairlift in a Python program: python examples/library.py [MODEL_FOLDER]"""

import sys

import chairlift
from chairlift.demo import demo_path

llm = chairlift.LLM(sys.argv[1] if len(sys.argv) > 1 else demo_path())
params = chairlift.SamplingParams(temperature=0, max_tokens=80)
questions = ["What is static batching?", "What is dynamic batching?", "What is continuous batching?"]
answers = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
for question, answer in zip(questions, answers, strict=True):
    print(f"{question}\n  {answer.outputs[0].text}\n")
