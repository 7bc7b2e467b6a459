"""Loads a recipe's environment before a run, in a process of its own: a misspelt key is found in a moment.

python -m megarl.envs.preflight      # section `env` as JSON on stdin; the error, if any, as JSON on stdout
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from megarl.errors import ConfigError
from megarl.rewards.preflight import answer, ask

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_LIMIT_S = 5.0


def check_environment(config: RunConfig, limit_s: float = _LIMIT_S) -> ConfigError | None:
    """Import the class that `env.name` refers to and validate its keys; one that takes longer is left to the workers.

    Returns:
        A warning, where the environment scores its episodes and the recipe sets a reward as well.

    Raises:
        ConfigError: what a worker would raise.
    """
    if config.has_turns:
        scores = ask(__name__, dict(config.env), limit_s)
        default = type(config.reward)().model_dump()
        given = {key: value for key, value in config.reward.model_dump().items() if value != default[key]}
        if scores and given:
            return ConfigError(
                f"the environment {config.env['name']} scores its episodes itself: what the recipe sets here changes "
                "nothing",
                where="reward",
                found=given,
                fix="remove it (on the command line: reward='!replace {}'), or set scores = False in the class for the "
                "reward function to score",
            )
    elif set(config.env) - {"name"}:
        from megarl.envs.registry import load_environment

        load_environment(config.env)
    return None


def main() -> None:
    """Load the environment and what its settings name."""
    from megarl.envs.registry import load_environment

    env = json.load(sys.stdin)

    def work() -> bool:
        kind, settings = load_environment(env)
        kind.check(settings)
        return kind.scores

    answer(work)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that the import may have started do not keep the command waiting
