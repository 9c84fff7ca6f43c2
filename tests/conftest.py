import os
import tempfile

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, each with processes of its own

_state = tempfile.TemporaryDirectory(prefix="flowspec-state-")
os.environ["XDG_STATE_HOME"] = _state.name  # what chats keep is not the user's

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("suite")
