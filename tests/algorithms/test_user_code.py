"""What a component of a user's file raises or returns wrongly: one message with its file and line."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.advantages import estimate
from megarl.algorithms.divergences import chosen_divergence, terms
from megarl.algorithms.kl import chosen_estimator, kl_tokens
from megarl.algorithms.objective import Objective, TokenInputs, actor_loss
from megarl.algorithms.resampling import resampled
from megarl.config.algorithm import AlgorithmConfig, DistillationConfig, KLConfig, PolicyLossConfig, ResamplingConfig
from megarl.config.correction import RolloutCorrectionConfig
from megarl.system.errors import ConfigError

MASK = torch.tensor([True, True, False])
NUMBERS = torch.tensor([-1.0, -2.0, -3.0])
HEAD = """import torch
from megarl.algorithms.advantages import ADVANTAGES, Estimate
from megarl.algorithms.kl import KL
from megarl.algorithms.divergences import DivergenceSettings
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.system.metrics import Metrics
"""
#: Line of the component in these files.
LINE = HEAD.count("\n") + 1


@pytest.fixture
def component(tmp_path, request):
    """component(source) -> reference to the function `mine` of a new file with this source."""

    def write_file(source: str) -> str:
        file = tmp_path / f"mine_{abs(hash(request.node.name + source))}.py"
        file.write_text(HEAD + source)
        return f"{file}:mine"

    return write_file


def policy_loss(name, logp=NUMBERS, **more):
    logp = logp.clone().requires_grad_()
    given = {"old_logp": NUMBERS, "advantages": torch.ones(3), "mask": MASK, "weights": MASK / 2, **more}
    return actor_loss(logp, *given.values(), PolicyLossConfig(name=name), tokens=2.0, offsets=torch.tensor([0, 2, 3]))


LOSS = "def mine(logp, old_logp, advantages, mask, cfg, *, offsets):\n    "


@pytest.mark.parametrize(
    ("body", "found", "fix"),
    [
        ("return -logp", "float32 tensor of shape [3]", "Metrics"),
        ("return (-logp * mask).mean(), Metrics()", "float32 tensor of shape []", "not their mean or sum"),
        ("return 0.5, Metrics()", "float 0.5", "not their mean or sum"),
        ("return -logp[mask], Metrics()", "float32 tensor of shape [2]", "one number per token"),
        ("return -logp[:, None], Metrics()", "float32 tensor of shape [3, 1]", "one number per token"),
        ("return mask, Metrics()", "bool tensor of shape [3]", ".float()"),
        ("return -logp, {'loss': 1.0}", "dict {'loss': 1.0}", "Metrics"),
        ("return None", "None", "Metrics"),
        ("return (logp / 0) * mask, Metrics()", "-inf at [0]", "NaN * 0 is NaN"),
        ("return -logp.detach(), Metrics()", "float32 tensor of shape [3]", "without detach()"),
    ],
)
def test_a_loss_that_returns_something_else_is_located(component, body, found, fix):
    name = component(LOSS + body)
    with pytest.raises(ConfigError) as caught:
        policy_loss(name)
    error = caught.value
    assert error.where == f"{name.removesuffix(':mine')}:{LINE}"
    assert (
        error.what.startswith("the policy loss mine "),
        found in error.found,
        fix in error.fix,
    ) == ((True,) * 3), str(error)


def test_a_loss_is_not_blamed_for_log_probs_that_are_not_finite(component):
    loss, _ = policy_loss(component(LOSS + "return -logp, Metrics()"), logp=torch.tensor([torch.nan, 0.0, 0.0]))
    assert loss.isnan()


def test_the_line_that_raises_is_named_and_memory_that_runs_out_stays_as_it_is(component):
    name = component(LOSS + "x = logp / 2\n    return x.nonsense, Metrics()")
    with pytest.raises(ConfigError, match="policy loss mine raised AttributeError") as caught:
        policy_loss(name)
    assert caught.value.found.endswith(f":{LINE + 2}: return x.nonsense, Metrics()")
    for kind in ("MemoryError", "torch.OutOfMemoryError"):
        with pytest.raises((MemoryError, torch.OutOfMemoryError)):
            policy_loss(component(f"{LOSS}raise {kind}('no room')"))


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("mask", "bool tensor of shape [3]"),
        ("{'chosn': mask}", "chosn: bool tensor of shape [3]"),
        ("{'chosen': mask[:2]}", "chosen: bool tensor of shape [2]"),
        ("{}", ""),
    ],
)
def test_what_a_loss_prepares_are_its_keyword_arguments(component, returned, found):
    name = component(
        f"def look(old_logp, advantages, mask, cfg, *, keys, all_sum):\n    return {returned}\n"
        "@POLICY_LOSSES.register(prepare=look)\n"
        "def mine(logp, old_logp, advantages, mask, cfg, *, offsets, chosen): ...\n"
    )
    algorithm = AlgorithmConfig(loss=PolicyLossConfig(name=name))
    objective = Objective.of(algorithm, RolloutCorrectionConfig().resolved())
    inputs = TokenInputs(torch.tensor([0, 3]), NUMBERS, MASK, MASK, old_logp=NUMBERS)
    with pytest.raises(ConfigError, match="policy loss look does not return the keyword arguments") as caught:
        objective.prepare(inputs, torch.arange(3), lambda x: x)
    assert (caught.value.where, caught.value.found) == (f"{name.removesuffix(':mine')}:{LINE}", found)
    assert caught.value.allowed.endswith("with the keys chosen")


@pytest.mark.parametrize(
    ("body", "found", "fix"),
    [
        ("return token_rewards", "float32 tensor of shape [3]", "Estimate(advantages, advantages)"),
        ("return {'advantages': token_rewards}", "dict", "Estimate(advantages, advantages)"),
        ("return token_rewards.sum(), token_rewards.sum()", "float32 tensor of shape []", "not their mean"),
        ("return torch.ones(2), torch.ones(2)", "float32 tensor of shape [2]", "Rows.of(mask, offsets).spread"),
        ("return token_rewards, None", "None", "one number per token"),
        ("return token_rewards * float('nan'), token_rewards", "nan at [0]", "0/0"),
    ],
)
def test_an_estimator_that_returns_something_else_is_located(component, body, found, fix):
    name = component(f"def mine(token_rewards, mask):\n    {body}")
    fields = {"token_rewards": NUMBERS, "mask": MASK, "offsets": torch.tensor([0, 2, 3]), "uid": ["a", "b"]}
    with pytest.raises(ConfigError) as caught:
        estimate(name, fields, {})
    error = caught.value
    assert error.where == f"{name.removesuffix(':mine')}:{LINE}"
    assert (
        error.what.startswith("the advantage estimator mine "),
        found in error.found,
        fix in error.fix,
    ) == ((True,) * 3), str(error)


@pytest.mark.parametrize("body", ["d.mean()", "d[:1]", "(d > 0)", "d / 0", "d.nonsense"])
def test_a_kl_estimator_returns_one_number_per_token(component, body):
    estimator = chosen_estimator(KLConfig(estimator=component(f"@KL.register()\ndef mine(d):\n    return {body}")))
    with pytest.raises(ConfigError, match=rf"py:{LINE}: the KL estimator mine (does not return|raised|returns)"):
        kl_tokens(estimator, NUMBERS, NUMBERS, MASK)


def test_a_divergence_returns_one_term_per_token_of_the_teacher(component):
    source = "@KL.register(settings=DivergenceSettings, distributions=True)\ndef mine(teacher, policy):\n    return "
    for body in ("(teacher - policy).sum(-1)", "teacher.exp() / 0"):
        chosen = chosen_divergence(DistillationConfig(coef=1.0, estimator=component(source + body)))
        with pytest.raises(ConfigError, match=rf"py:{LINE}: the KL estimator mine (does not return|returns)"):
            terms(chosen, NUMBERS[None], NUMBERS[None])


def test_weights_of_resampling_are_located(component):
    section = ResamplingConfig(name=component("def mine(scores):\n    return -scores"))
    with pytest.raises(ConfigError, match=rf"py:{LINE}: the resampling mine does not return(?s:.*)-1\.0"):
        resampled(section, torch.tensor([1.0, 2.0]), seed=0)
