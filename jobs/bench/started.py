"""A harness that does nothing but get ready for its first call; it prints when it was, and the
CPU seconds that took."""

import time

import openai

openai.OpenAI()
print(time.time(), time.process_time())
