"""A check of a recipe's environment before a run, in a separate process: a misspelt key is found in a moment.

python -m megarl.envs.preflight      # section `env` as JSON on stdin; the error, if any, as JSON on stdout
python -m megarl.envs.preflight keys      # the same, and the answer is the environment's own keys
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, cast

from megarl.errors import ConfigError
from megarl.rewards.preflight import KEYS_LIMIT_S, answer, ask

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_LIMIT_S = 5.0


def check_environment(config: RunConfig, limit_s: float = _LIMIT_S) -> ConfigError | None:
    """Import the class that `env.name` refers to and validate its keys; a slow import is left to the workers.

    Returns:
        A warning if the environment scores its episodes and the recipe also sets a reward.

    Raises:
        ConfigError: the error that a worker would raise.
    """
    from megarl.envs.registry import check_longest, load_environment

    if config.has_turns:
        reply = ask(__name__, dict(config.env), limit_s, where="env.name")
        scores, longest_s = reply if isinstance(reply, list) else (None, None)
        check_longest(longest_s, config.cluster.timeout_s / 2)
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
        load_environment(config.env)
    return None


def find_own_keys(name: str, limit_s: float = KEYS_LIMIT_S) -> list[str] | None:
    """Return the own keys of an environment in section `env`; None: its import takes too long.

    Raises:
        ConfigError: it cannot be found.
    """
    from megarl.envs.registry import ENVIRONMENTS, environment_class

    if name in ENVIRONMENTS or ":" not in name:
        return list(environment_class(name).Settings.model_fields)
    return cast("list[str] | None", ask(__name__, {"name": name}, limit_s, "keys", where="env.name"))


def main() -> None:
    """Load the environment and the components that its settings name, or find its keys."""
    from megarl.envs.registry import environment_class, load_environment

    env = json.load(sys.stdin)

    def work() -> object:
        if sys.argv[1:] == ["keys"]:
            return list(environment_class(env["name"]).Settings.model_fields)
        kind, settings = load_environment(env)
        kind.check(settings)
        return kind.scores, settings.longest_s

    answer(work)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that the import may have started do not keep the command waiting
