"""Property tests here build tensors, so the first example of a run may be slow: no deadline per example."""

from hypothesis import settings

settings.register_profile("data", max_examples=60, deadline=None)
settings.load_profile("data")
