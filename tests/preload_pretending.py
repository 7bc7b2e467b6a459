"""As `tests.preload`, in the process whose ranks have a pretended GPU each."""

from tests import pretend_cuda

pretend_cuda.install()

import tests.preload  # noqa: E402, F401
