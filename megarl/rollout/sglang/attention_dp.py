"""Checks of attention that is data parallel inside a server (`rollout.sglang.attention_dp`).

Read in SGLang 0.5.23 (sglang/srt): `arg_groups/fields/parallel.py` has the argument `--attn-dp-size`, which `--dp-size`
with `--enable-dp-attention` was before; rank r of a server has the heads of rank r % (tp / attn_dp) and the requests of
group r // (tp / attn_dp) (`runtime_context.py`, `derive_attention_ranks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import divisors
from megarl.config.run import RunConfig

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

_KEY = "rollout.sglang.attention_dp"
#: Arguments by which the ranks of a server would hold other parts of the weights than `ServerLayout` expects.
_OTHER_PARTS = (
    *("--enable-dp-lm-head", "--enable-tp-lm-head-all-to-all", "--moe-dense-tp-size"),
    *("--enable-shared-experts-attn-tp", "--attn-cp-size", "--attention-context-parallel-size", "--moe-dp-size"),
    "--moe-a2a-backend",
)
_WITH_DRAFT_HEAD = ("EAGLE", "EAGLE3")  # SGLang refuses the other algorithms with data-parallel attention


def check_attention_dp(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the servers' attention can be data parallel. `facts`: sizes of the policy; None: not known."""
    servers = config.rollout.sglang
    groups = servers.attention_dp
    if groups == 1:
        return
    if servers.tp_size % groups:
        checks.fail(
            _KEY,
            f"the {servers.tp_size} ranks of a server cannot form groups of equal size",
            found=groups,
            allowed=divisors(servers.tp_size),
            fix="change attention_dp or tp_size",
        )
    # the server's parser also accepts the beginning of an argument's name
    names = [argument.partition("=")[0] for argument in servers.extra_args if argument.startswith("--")]
    other = [name for name in names if any(each.startswith(name) for each in _OTHER_PARTS)]
    if other:
        checks.fail(
            "rollout.sglang.extra_args",
            "with these arguments a server divides its weights in a way that megarl does not support with attention_dp",
            found=other,
            allowed="other arguments, if attention_dp is above 1",
            fix="leave them out",
        )
    draft = servers.speculative
    if draft is not None and draft.algorithm not in _WITH_DRAFT_HEAD:
        checks.fail(
            "rollout.sglang.speculative.algorithm",
            "SGLang cannot use this source of drafts with data-parallel attention",
            found=draft.algorithm,
            allowed=", ".join(_WITH_DRAFT_HEAD),
            fix=f"set rollout.sglang.speculative=null, or {_KEY}=1",
        )
    if facts is not None:
        _check_class(facts, groups, checks)


def _check_class(facts: ModelFacts, groups: int, checks: Checklist) -> None:
    """Check that SGLang's class of the model can divide requests among groups of ranks."""
    with_dp = sorted(name for name, each in ARCHITECTURES.items() if each.served.attention_dp)
    if not ARCHITECTURES[facts.model_type].served.attention_dp:
        checks.fail(
            _KEY,
            f"SGLang's class of a {facts.model_type} has the same requests on all ranks of a server",
            found=groups,
            allowed=f"1; more for {', '.join(with_dp)}",
            fix=f"set {_KEY}=1, and use several servers (rollout.sglang.servers)",
        )
    elif facts.encoder is not None:
        checks.fail(
            _KEY,
            "SGLang's vision encoders add up the results of all ranks of a server, which would have different images",
            found=groups,
            allowed="1 with a vision encoder",
            fix=f"set {_KEY}=1, or model.vision=false if prompts have no images",
        )
