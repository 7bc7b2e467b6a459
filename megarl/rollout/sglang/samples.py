"""Samples on their way: the request to a server, and the sum of its answers.

A sample may need several answers: an abort (by a weight update, for example) hands back what there is, and generation
goes on from there. The noise of a seeded sample depends on its seed and the place in the sequence only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.data.versions import runs_of
from megarl.rollout.engine import Completion, FinishReason
from megarl.rollout.sglang.images import ServedImages
from megarl.rollout.stop_strings import StopStrings
from megarl.sync.protocol import read_tag


class BadAnswerError(Exception):
    """A server's answer lacks something or contradicts itself."""


class OtherPromptError(Exception):
    """A server has made other tokens of a prompt with images."""


@dataclass
class ServedSample:
    """One sample: `seed` of prompt number `prompt`, and what is there of it so far.

    Attributes:
        versions: weight version of every token.
        interruptions: answers that did not end the sample.
        late: requests that were not answered within their deadline.
        aborted: it is to end with what there is of it.
        cached: tokens of the prompt that the server had in its prefix cache.
        room: tokens, at most; None: as the sampling settings say.
        strings: of sampling; None: it has none. Servers have no tokenizer and sample on: what they sampled after the
            end is dropped.
        begun: of the prompt, the last tokens that belong to the turn which the sample continues.
        drafts: tokens that a draft has proposed (speculative decoding), and how many of them the model has taken.
    """

    prompt: int
    prompt_ids: list[int]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    interruptions: int = 0
    late: int = 0
    room: int | None = None
    aborted: bool = False
    cached: int = 0
    images: ServedImages | None = None
    drafts: tuple[int, int] = (0, 0)
    strings: StopStrings | None = None
    begun: int = 0

    def _most(self, sampling: SamplingConfig) -> int:
        """Return the tokens of this sample, at most."""
        return sampling.max_new_tokens if self.room is None else min(self.room, sampling.max_new_tokens)

    def payload(self, sampling: SamplingConfig, stop_ids: Sequence[int]) -> dict[str, Any]:
        """Return the body of the /generate request for the rest of this sample."""
        if self.images is not None and self.images.image_token(self.prompt_ids) in self.token_ids:
            # The server would take what the sample says for an image that is missing.
            self.token_ids, self.logprobs, self.versions = [], [], []
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": self._most(sampling) - len(self.token_ids),
            "sampling_seed": self.seed,
        }
        settings |= {"ignore_eos": True} if sampling.ignore_eos else {"stop_token_ids": list(stop_ids)}
        found = self.prompt_fields()
        found["input_ids"] += self.token_ids
        return found | {"sampling_params": settings, "return_logprob": True}

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of a request that hold the prompt."""
        if self.images is None:
            return {"input_ids": list(self.prompt_ids)}
        return self.images.request(self.prompt_ids)

    def add(self, answer: dict[str, Any], sampling: SamplingConfig, stop_ids: Sequence[int], tag: str) -> None:
        """Take over an answer to `payload`; sets `finish_reason` when it completes the sample.

        Args:
            tag: the server's present tag of its weights (`version_tag`). An answer may begin with older ones of the
                same run.

        Raises:
            BadAnswerError: tokens, log-probs and weight versions do not belong together, or the weights are not those
                that this run has sent.
            OtherPromptError: the server counts other tokens of a prompt with images.
        """
        self._check_prompt(answer)
        try:
            ids, meta = answer["output_ids"], answer["meta_info"]
            scored = meta["output_token_logprobs"]
            versions = _per_token(meta, len(ids), tag)
            reason = meta["finish_reason"]["type"]
            logprobs = [float(entry[0]) for entry in scored]
            if [entry[1] for entry in scored] != ids:
                raise ValueError(f"log-probs of {len(scored)} tokens that are not the {len(ids)} tokens of the answer")
            if reason == "length" and not (self.token_ids or ids):
                raise ValueError("no token, and the length limit is said to be reached")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise BadAnswerError(what) from error
        proposed, taken = (int(meta.get(f"spec_num_{kind}_drafts") or 0) for kind in ("proposed", "correct"))
        self.drafts = self.drafts[0] + proposed, self.drafts[1] + taken
        if not self.token_ids:
            self.cached = int(meta.get("cached_tokens") or 0)
        before = len(self.token_ids)
        self.token_ids += ids
        self.logprobs += logprobs
        self.versions += versions
        if self._end_at_string(before):
            return
        # The server also stops at the end tokens of the model's configuration; those that are none here are passed by.
        # At the last allowed place it says `length` whatever the token is.
        if self.token_ids and self.token_ids[-1] in stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._most(sampling) or reason == "length":
            self.finish_reason = "length"
        else:
            self.interruptions += 1

    def _end_at_string(self, before: int) -> bool:
        """End the sample where its text has come to a stop string after the first `before` tokens."""
        if self.strings is None:
            return False
        turn = [*self.prompt_ids[len(self.prompt_ids) - self.begun :], *self.token_ids]
        end = self.strings.end(turn, self.begun + before)
        if end is None:
            return False
        for per_token in (self.token_ids, self.logprobs, self.versions):
            del per_token[end - self.begun :]
        self.finish_reason = "stop"
        return True

    def _check_prompt(self, answer: dict[str, Any]) -> None:
        """Compare the tokens that the server has read with those that it should have; text it takes as it is."""
        meta = answer.get("meta_info", {})
        unread = meta.get("finish_reason", {}).get("type") == "abort" and not answer.get("output_ids")
        if self.images is None or unread:  # a request that was aborted in its queue was never read
            return
        found, expected = meta.get("prompt_tokens"), len(self.prompt_ids) + len(self.token_ids)
        if found != expected:
            raise OtherPromptError(
                f"the server has made {found} tokens of a prompt with images that has {expected}: its processor has "
                "resized an image, or read the text again; its preprocessor_config.json has to allow images of any "
                "number of pixels, and its tokenizer has to be that of the run"
            )

    def completion(self) -> Completion:
        """Return the finished sample."""
        assert self.finish_reason is not None
        return Completion(self.token_ids, self.logprobs, self.finish_reason, runs_of(self.versions), self.cached)


def _per_token(meta: dict[str, Any], count: int, tag: str) -> list[int]:
    """Weight version of each of `count` tokens, out of the spans the server gives.

    A server that several runs use may have been given weights by another one while it answered.
    """
    now = meta["weight_version"]
    spans = meta.get("weight_versions") or [{"version": now, "start": 0, "end": count}]
    versions = [_own_version(span["version"], tag) for span in spans for _ in range(span["end"] - span["start"])]
    if len(versions) != count:
        raise ValueError(f"weight versions of {len(versions)} tokens for {count} tokens")
    if _own_version(now, tag) != read_tag(tag)[0]:
        raise ValueError(f"generated with the old weights {now!r}, although the server has acknowledged {tag!r}")
    return versions


def _own_version(found: object, tag: str) -> int:
    """Return the version in `found`, which must be of the run of `tag` and not newer."""
    (number, run), (newest, own) = read_tag(found), read_tag(tag)
    if run != own:
        raise ValueError(f"generated with the weights {found!r} of another run; this run has sent {tag!r}")
    if number > newest:
        raise ValueError(f"generated with the weights {found!r}; the newest that this run has sent are {tag!r}")
    return number
