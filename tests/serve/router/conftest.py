"""The GPU lane runs where the server's packages may be missing."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("uvicorn") else ["test_*.py"]
