"""Scores of responses: included rewards, users' functions, and a runner that scores while other work continues."""

from megarl.rewards import classifier as _classifier
from megarl.rewards import exact_match as _exact_match
from megarl.rewards import format as _format
from megarl.rewards import gsm8k as _gsm8k
from megarl.rewards import http as _http
from megarl.rewards import judge as _judge
from megarl.rewards import math as _math
from megarl.rewards import numeric as _numeric
from megarl.rewards import reward_model as _reward_model
from megarl.rewards.parts import Rewards
from megarl.rewards.registry import REWARDS
from megarl.rewards.runner import reward_metrics

#: Modules of the included rewards; importing a module registers its reward.
INCLUDED = (_classifier, _exact_match, _format, _gsm8k, _http, _judge, _math, _numeric, _reward_model)

__all__ = ["INCLUDED", "REWARDS", "Rewards", "reward_metrics"]
