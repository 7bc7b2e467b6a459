"""Check that `data.loader_kwargs` are arguments that a data function takes. Functions are imported in another process.

python -m megarl.checks.arguments      # sources and arguments as JSON on stdin; the error, if any, as JSON on stdout
"""

from __future__ import annotations

import json
import os
import sys

from megarl.config.data import DataConfig
from megarl.config.run import RunConfig
from megarl.data.sources import check_loader_kwargs, is_function
from megarl.rewards.preflight import answer, ask

_LIMIT_S = 5.0


def check_arguments(config: RunConfig, limit_s: float = _LIMIT_S) -> None:
    """Refuse arguments that no source takes; functions that take longer to import are left to the workers.

    Raises:
        ConfigError: the error that a worker would raise.
    """
    data, more = config.data, config.sft.train_files or []
    if not data.loader_kwargs:
        return
    if any(is_function(source) for source in [*data.train_files, *data.val_files, *more]):
        kwargs = dict.fromkeys(data.loader_kwargs)  # the names count
        request = {"train_files": data.train_files, "val_files": data.val_files, "loader_kwargs": kwargs}
        ask(__name__, {"data": request, "more": more}, limit_s, where="data.train_files / data.val_files")
    else:
        check_loader_kwargs(data, more)


def main() -> None:
    """Check the functions' signatures."""
    request = json.load(sys.stdin)
    sys.path.append(os.getcwd())  # as in workers
    answer(lambda: check_loader_kwargs(DataConfig(**request["data"]), request["more"]))


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that the import may have started do not keep the command waiting
