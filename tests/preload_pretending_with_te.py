"""As `tests.preload_te`, in the process whose ranks have a pretended GPU each."""

from tests import pretend_cuda

pretend_cuda.install()

import tests.preload_te  # noqa: E402, F401
