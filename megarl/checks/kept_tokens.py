"""Checks of training on the tokens that the sampling filters kept."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig

_KEY = "rollout.replay_kept_tokens"
#: The most kept tokens of one sampled token, 8 KB. Servers return up to 4096, and may keep more than top_k where tokens
#: tie.
_MOST = 2048


def check_kept_tokens(config: RunConfig, checks: Checklist) -> None:
    """Check that the run can record the tokens that sampling's filters keep, and that top_k bounds their number."""
    if not config.rollout.replay_kept_tokens:
        return
    sampling, servers = config.rollout.sampling, config.rollout.servers
    if not config.task.writes_text:
        checks.fail(
            _KEY,
            "the policy of this task samples without filters",
            found="true",
            allowed="false",
            fix=f"set {_KEY}=false",
        )
        return
    least = 1 if servers is None else 2
    if not least <= sampling.top_k <= _MOST:
        checks.fail(
            "rollout.sampling.top_k",
            f"{_KEY} records every token that the filters keep, and top_k bounds their number",
            found=sampling.top_k,
            allowed=f"integer from {least} to {_MOST}",
            fix=f"set rollout.sampling.top_k=512, which rarely excludes a token that top_p keeps, or {_KEY}=false",
        )
    if servers is not None and servers.speculative is not None:
        checks.fail(
            _KEY,
            "kept tokens of speculative decoding are not supported",
            found=servers.speculative.algorithm,
            allowed="no draft model",
            fix=f"set rollout.sglang.speculative=null, or {_KEY}=false",
        )
