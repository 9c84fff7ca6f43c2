import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, each with processes of its own

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")
