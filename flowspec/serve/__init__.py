"""The OpenAI-compatible API on the head; asyncio is here and nowhere else."""
