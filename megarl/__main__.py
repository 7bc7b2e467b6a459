"""Entry of `python -m megarl`, which is the `megarl` command."""

import sys

from megarl.cli import main

sys.exit(main())
