"""Samples in flight: the request to a server, and the tokens of its answers so far.

A sample may need several answers: an abort (by a weight update, for example) returns the partial tokens, and the next
request continues from them. The noise of a seeded sample depends only on its seed and the position in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarl.config.rollout import SamplingConfig
from megarl.data.kept_tokens import KeptTokens
from megarl.data.routes import RouteForm, continued
from megarl.data.versions import runs_of
from megarl.rollout.engine import Completion, FinishReason
from megarl.rollout.sglang.images import ServedImages
from megarl.rollout.sglang.routes import REQUEST, read_routes
from megarl.rollout.stop_strings import StopStrings
from megarl.sync.protocol import read_tag

_OTHER_SGLANG = "run servers with an SGLang that `make sglang-env` installs"


class BadAnswerError(Exception):
    """A server's answer is incomplete or contradicts itself."""


class OtherPromptError(Exception):
    """A server has tokenised a prompt with images differently."""


@dataclass
class ServedSample:
    """A sample that servers generate, with its tokens so far.

    Attributes:
        prompt: number of the prompt; samples of one prompt are routed to the same server.
        token_ids, logprobs, versions: tokens so far, and the log-prob and weight version of each.
        interruptions: number of answers that did not end the sample.
        late: number of requests that were not answered within their deadline.
        room: token limit, up to `sampling.max_new_tokens`, which is also the default.
        aborted: whether the sample was aborted, so that it ends with its partial tokens.
        cached: number of prompt tokens that were in the server's prefix cache.
        drafts: numbers of draft tokens that were proposed and accepted (speculative decoding).
        strings: the stop strings of sampling; None: no stop strings. Servers have no tokenizer and do not stop at
            these strings, so later tokens are dropped.
        begun: number of tokens at the end of the prompt that belong to the turn which the sample continues.
        form: form of the routes to request; None: no routes.
        routes: routes of the first tokens of prompt and response, as far as they are known.
        kept_tokens: tokens that the filters kept for each token, over which log-probs are then; None: not requested.
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
    form: RouteForm | None = None
    routes: Tensor | None = None
    kept_tokens: list[list[int]] | None = None

    def _most(self, sampling: SamplingConfig) -> int:
        """Return the largest number of tokens that this sample may have."""
        return sampling.max_new_tokens if self.room is None else min(self.room, sampling.max_new_tokens)

    def payload(self, sampling: SamplingConfig, stop_ids: Sequence[int]) -> dict[str, Any]:
        """Return the body of the /generate request for the rest of this sample."""
        if self.images is not None and self.images.image_token(self.prompt_ids) in self.token_ids:
            # The server would look for an image at each image token, so a sample that contains one starts again.
            self.token_ids, self.logprobs, self.versions, self.routes = [], [], [], None
            self.kept_tokens = None if self.kept_tokens is None else []
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": self._most(sampling) - len(self.token_ids),
            "sampling_seed": self.seed,
        }
        settings |= {"ignore_eos": True} if sampling.ignore_eos else {"stop_token_ids": list(stop_ids)}
        fields = self.prompt_fields()
        fields["input_ids"] += self.token_ids
        wishes = {} if self.form is None else REQUEST
        wishes = wishes if self.kept_tokens is None else {**wishes, "return_sampling_mask": True}
        return fields | {"sampling_params": settings, "return_logprob": True, **wishes}

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of a request that hold the prompt."""
        ids = self.prompt_ids
        return {"input_ids": list(ids)} if self.images is None else self.images.request(ids)

    def add(
        self, answer: dict[str, Any], sampling: SamplingConfig, stop_ids: Sequence[int], tag: str, adapter: bool = False
    ) -> None:
        """Add the tokens of an answer to `payload`; sets `finish_reason` if the answer completes the sample.

        Args:
            tag: the expected tag of the server's weights (`version_tag`). The first tokens may be of older weights of
                the same run.
            adapter: whether `tag` is the adapter that the request named, which has generated all tokens, even if the
                server has newer ones by now.

        Raises:
            BadAnswerError: tokens, log-probs and weight versions do not match, or this run has not sent these weights.
            OtherPromptError: the server counted a different number of tokens in a prompt with images.
        """
        self._check_prompt(answer)
        try:
            ids, meta = answer["output_ids"], answer["meta_info"]
            scored = meta["output_token_logprobs"]
            versions = _per_token(meta, len(ids), tag, adapter=adapter)
            reason = meta["finish_reason"]["type"]
            logprobs = [float(entry[0]) for entry in scored]
            if [entry[1] for entry in scored] != ids:
                raise ValueError(
                    f"the answer has {len(ids)} tokens and the log-probs of {len(scored)} other tokens; {_OTHER_SGLANG}"
                )
            recorded: list[list[int]] = []
            if self.kept_tokens is not None:
                recorded, logprobs = _kept_tokens(meta, ids)
            length = len(self.prompt_ids) + len(self.token_ids) + len(ids)
            routes = None if self.form is None else read_routes(meta, self.form, length)
            if reason == "length" and not (self.token_ids or ids):
                raise ValueError(f"the answer has no token, but reached the length limit; {_OTHER_SGLANG}")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadAnswerError(str(error) if isinstance(error, ValueError) else repr(error)) from error
        proposed, accepted = (int(meta.get(f"spec_num_{kind}_drafts") or 0) for kind in ("proposed", "correct"))
        self.drafts = self.drafts[0] + proposed, self.drafts[1] + accepted
        if not self.token_ids:
            self.cached = int(meta.get("cached_tokens") or 0)
        before = len(self.token_ids)
        self.token_ids += ids
        self.logprobs += logprobs
        self.versions += versions
        if self.kept_tokens is not None:
            self.kept_tokens += recorded
        if routes is not None:
            self.routes = continued(self.routes, routes)
        if self._end_at_string(before):
            return
        # The server also stops at end tokens of the model's config that are not end tokens here; such a sample goes on.
        # At the last allowed token the server returns `length` even for an end token.
        if self.token_ids and self.token_ids[-1] in stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._most(sampling) or reason == "length":
            self.finish_reason = "length"
        else:
            self.interruptions += 1

    def _end_at_string(self, before: int) -> bool:
        """End the sample at the first stop string past its first `before` tokens; return whether there is one."""
        if self.strings is None:
            return False
        turn = [*self.prompt_ids[len(self.prompt_ids) - self.begun :], *self.token_ids]
        end = self.strings.end(turn, self.begun + before)
        if end is None:
            return False
        for per_token in (self.token_ids, self.logprobs, self.versions, self.kept_tokens or []):
            del per_token[end - self.begun :]
        self.finish_reason = "stop"
        return True

    def _check_prompt(self, answer: dict[str, Any]) -> None:
        """Check that the server counted the expected number of tokens in a prompt with images."""
        meta = answer.get("meta_info", {})
        unread = meta.get("finish_reason", {}).get("type") == "abort" and not answer.get("output_ids")
        if self.images is None or unread:  # the server never read the prompt of a request aborted in its queue
            return
        count, expected = meta.get("prompt_tokens"), len(self.prompt_ids) + len(self.token_ids)
        if count != expected:
            raise OtherPromptError(
                f"the server has read {count} tokens of a prompt with images instead of {expected}, because its "
                "processor has resized an image or tokenised the text differently; its preprocessor_config.json must "
                "allow images of any number of pixels, and its tokenizer must be that of the run"
            )

    def completion(self) -> Completion:
        """Return the finished sample."""
        assert self.finish_reason is not None
        routes = None if self.routes is None else self.routes[: len(self.prompt_ids) + len(self.token_ids) - 1]
        versions = runs_of(self.versions)
        record = None if self.kept_tokens is None else KeptTokens.from_lists(self.kept_tokens)
        return Completion(self.token_ids, self.logprobs, self.finish_reason, versions, self.cached, routes, record)


def _kept_tokens(meta: dict[str, Any], ids: list[int]) -> tuple[list[list[int]], list[float]]:
    """Return, for each token of an answer, the tokens that the filters kept and the log-prob over these.

    Raises:
        ValueError: the lists do not fit the answer's tokens `ids`.
    """
    recorded = meta["output_token_sampling_mask"]
    if len(recorded) != len(ids) or any(i not in row for i, row in zip(ids, recorded, strict=True)):
        raise ValueError(
            f"the answer has {len(recorded)} lists of kept tokens, which do not fit its {len(ids)} tokens; "
            f"{_OTHER_SGLANG}"
        )
    return recorded, [float(value) for value in meta["output_token_sampling_logprobs"]]


def _per_token(meta: dict[str, Any], count: int, tag: str, *, adapter: bool) -> list[int]:
    """Return the weight version of each of the `count` tokens of an answer, from the spans in its `meta`.

    With `adapter` all tokens are of the adapter `tag`, and the server's version may be newer.

    Raises:
        ValueError: a version is newer than `tag` or of another run, which may have sent the server weights meanwhile.
    """
    now = meta["weight_version"]
    if adapter and read_tag(now)[1] == read_tag(tag)[1]:
        return [read_tag(tag)[0]] * count
    spans = meta.get("weight_versions") or [{"version": now, "start": 0, "end": count}]
    runs = [[_own_version(span["version"], tag)] * (span["end"] - span["start"]) for span in spans]
    versions = [version for run in runs for version in run]
    if len(versions) != count:
        raise ValueError(
            f"the answer has weight versions for {len(versions)} tokens, but {count} tokens; {_OTHER_SGLANG}"
        )
    if _own_version(now, tag) != read_tag(tag)[0]:
        raise ValueError(
            f"the answer was generated with the old weights {now!r}, although the server has acknowledged {tag!r}"
        )
    return versions


def _own_version(weights: object, tag: str) -> int:
    """Return the weight version in the tag `weights`, which must be of the run of `tag` and not newer."""
    (number, run), (newest, this_run) = read_tag(weights), read_tag(tag)
    if run != this_run:
        raise ValueError(
            f"the answer was generated with the weights {weights!r} of another run, but this run has sent {tag!r}; let "
            "only one run at a time use a server"
        )
    if number > newest:
        raise ValueError(
            f"the answer was generated with the weights {weights!r}; the newest that this run has sent are {tag!r}"
        )
    return number
