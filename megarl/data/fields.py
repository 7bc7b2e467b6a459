"""The fields that megarl's stages may write into a batch: form, writer and meaning of each.

Importing a stage of megarl that declares an unlisted field is an error, and so is a node that returns a listed field in
another form. A user's stage may add fields under other names. `page` returns docs/fields.md.

    dtype     of a tensor (int64, int32, float32, bool, uint8; float32 or bfloat16 for the model's states;
              uint8 or int16 for routes), or type of the values of a column, which is a list (str, int, dict)
    shape     [B] one entry per sample; [B, prompt], [B, response], [B, mismatched], [B, tokens], [B, turns],
              [B, calls], [B, runs], [B, kept]: a Jagged, with as many entries as the sample has tokens of the prompt,
              its response or the mismatched one, tokens of both but the last one, turns, policy calls, runs of
              versions, tokens kept by the sampling filters
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.data.jagged import Jagged

#: Fields of samples with images.
IMAGES = PATCHES, GRIDS, DIGESTS = "image_patches", "image_grids", "image_digests"
#: The same fields for the images of the data's prompt, in samples that have the images of a whole episode.
DATA_IMAGES = tuple(f"data_{name}" for name in IMAGES)

#: The field of routes (`megarl.data.routes`).
ROUTES = "routes"

#: The fields of kept tokens (`megarl.data.kept_tokens`).
KEPT = KEPT_COUNTS, KEPT_IDS = "kept_counts", "kept_ids"

#: The fields of runs with demonstrations (`data.experts`).
SOURCE, EXPERT_MASK = "source", "expert_mask"
#: Values of `source`.
POLICY, EXPERT = "policy", "expert"

#: The field that marks the tokens at which a critic's values are used; without the field, all response tokens count.
VALUE_MASK = "value_mask"

_MODEL_DTYPE = "float32 or bfloat16"
_ROUTES_DTYPE = "uint8 or int16"
_TENSORS = ("int64", "int32", "float32", "bool", "uint8", _MODEL_DTYPE, _ROUTES_DTYPE)


@dataclass(frozen=True)
class Field:
    """A field of a batch."""

    dtype: str  # dtype of a tensor, or type of the values of a column
    shape: str  # such as [B, response]: an entry for each response token of each sample
    writer: str  # the stages, or other parts of the program, that write the field
    meaning: str
    example: str  # value of one sample

    @property
    def is_column(self) -> bool:
        """Whether the field is a list of plain values."""
        return self.dtype not in _TENSORS

    @property
    def is_jagged(self) -> bool:
        """Whether samples may have different numbers of entries."""
        return self.shape[4:5].islower()

    @property
    def form(self) -> str:
        """Dtype and shape, as messages and the table show them."""
        return f"column of {self.dtype}" if self.is_column else f"{self.dtype} {self.shape}"

    def misfit(self, value: Tensor | Jagged | list[Any]) -> str | None:
        """Return dtype and shape of `value`, as text, if they differ from the field's; None if they fit."""
        if isinstance(value, list):
            return None if self.is_column else "a column"
        jagged = hasattr(value, "offsets")
        dtype = str((value.values if jagged else value).dtype).removeprefix("torch.")  # type: ignore[union-attr]
        if not self.is_column and dtype in self.dtype.split(" or ") and jagged == self.is_jagged:
            return None
        return f"{dtype}, {'of different lengths' if jagged else list(value.shape)}"  # type: ignore[union-attr]


#: All fields by name, in the order of a step. A name that ends in "/" is the prefix of one field per camera.
FIELDS: dict[str, Field] = {
    # -- fields of every prompt, from the loader
    "prompt_ids": Field(
        "int64", "[B, prompt]", "loader; rollout with an environment", "tokens of the prompt", "[5, 9, 11]"
    ),
    "uid": Field("str", "[B]", "loader", "the prompt's name in the run; samples of one uid are a group", '"0:17"'),
    "prompt_text": Field("str", "[B]", "loader; rollout with an environment", "the prompt", '"47+85="'),
    "answer": Field("any", "[B]", "loader", "the reference for the reward: column data.answer_key", '"132"'),
    "data_source": Field("str", "[B]", "loader", "which data the row is of", '"gsm8k"'),
    "row": Field("dict", "[B]", "loader", "the row's other columns", '{"level": 3}'),
    "image_patches": Field(
        "uint8",
        "[B, patches]",
        "loader; rollout with an environment",
        "pixels of all images, a patch each",
        "[[12, 40, ...]]",
    ),
    "image_grids": Field(
        "int64",
        "[B, images]",
        "loader; rollout with an environment",
        "of each image its place in prompt and response, rows and columns of features; with data.video_key also -1, or "
        "for a temporal patch of a video the distance of its time to the video's first",
        "[[1, 2, 3]]",
    ),
    "image_digests": Field(
        "int64", "[B, images]", "loader; rollout with an environment", "hash of each image's pixels", "[-8132]"
    ),
    "margin": Field("float32", "[B]", "loader of pairs", "by how much the chosen score should be larger", "0.5"),
    "label": Field("bool", "[B]", "loader of examples (KTO)", "the response is desirable", "true"),
    "mismatched_ids": Field(
        "int64", "[B, mismatched]", "loader of examples (KTO)", "response of the example before it", "[25, 2]"
    ),
    "mismatched_mask": Field(
        "bool", "[B, mismatched]", "loader of examples (KTO)", "tokens of mismatched_ids that count", "[1, 1]"
    ),
    # -- what generation adds
    "response_ids": Field(
        "int64", "[B, response]", "rollout; loader of pairs", "all tokens after the prompt", "[21, 23, 2]"
    ),
    "response_mask": Field(
        "bool",
        "[B, response]",
        "rollout, filter, greedy_rollout, expert_gate; loader of pairs",
        "tokens that are trained on: the policy's own, of samples that no filter leaves out",
        "[1, 1, 1]",
    ),
    "rollout_logp": Field(
        "float32",
        "[B, response]",
        "rollout",
        "the engine's log-prob of each token; of an expert's response that of its file, NaN: unknown",
        "[-0.1, -0.7, 0.0]",
    ),
    "source": Field("str", "[B]", "rollout", "who wrote the response, with data.experts: policy or expert", '"policy"'),
    "expert_mask": Field(
        "bool", "[B, response]", "rollout, expert_gate", "tokens of an expert's response that are learnt", "[0, 0, 0]"
    ),
    "routes": Field(
        _ROUTES_DTYPE,
        "[B, tokens, layers * chosen]",
        "rollout",
        "experts that each layer with experts chose for the token; the number of experts: no choice is known",
        "[[3, 0, 1, 2]]",
    ),
    "kept_counts": Field(
        "int32",
        "[B, response]",
        "rollout",
        "number of tokens that the sampling filters kept; 0: no record",
        "[2, 1, 1]",
    ),
    "kept_ids": Field("int32", "[B, kept]", "rollout", "these tokens, one after the other", "[21, 9, 23, 2]"),
    "weight_versions": Field("int64", "[B, runs]", "rollout", "weights that generated each run of tokens", "[3, 4]"),
    "version_tokens": Field("int64", "[B, runs]", "rollout", "length of each of these runs", "[2, 1]"),
    "sample_id": Field("str", "[B]", "rollout; loader of pairs", "the sample's name: uid and number", '"0:17#2"'),
    "response_text": Field("str", "[B]", "rollout; loader of pairs", "the response, or its last turn", '"132"'),
    "finish_reason": Field("str", "[B]", "rollout", "stop, length or abort, of the last turn", '"stop"'),
    "greedy_score": Field("float32", "[B]", "greedy_rollout", "score of the prompt's greedy response (ReMax)", "1.0"),
    # -- additional fields of episodes
    "turn_starts": Field(
        "int64",
        "[B, turns]",
        "rollout",
        "where each turn begins in response_ids; of a policy that acts: each call",
        "[0, 7]",
    ),
    "turn_ends": Field("int64", "[B, turns]", "rollout", "where each turn ends", "[4, 9]"),
    "turn_rewards": Field("float32", "[B, turns]", "rollout", "the environment's rewards", "[0.0, 1.0]"),
    "turn_keys": Field(
        "int64",
        "[B, response]",
        "turn_keys",
        "at the first token of each turn a hash of the observation before it; 0 elsewhere",
        "[-8132, 0, 0, 0, 412, 0]",
    ),
    "observation_mask": Field(
        "bool",
        "[B, response]",
        "rollout",
        "the environment's own tokens, without those of the chat template, of episodes that did not fail (ECHO)",
        "[0, 0, 1, 1, 0, 0]",
    ),
    "ended_by": Field("str", "[B]", "rollout", "done, turns, tokens, images, seconds, image_token or error", '"done"'),
    "env_info": Field("dict", "[B]", "rollout", "numbers of the environment, over all turns", '{"calls": 2}'),
    "episode": Field("str", "[B]", "rollout", "name of the episode, of which the row is one sequence", '"0:17#3"'),
    "lane": Field("int64", "[B]", "rollout", "number of the row in its episode; 0 has the episode's reward", "0"),
    "policy": Field(
        "str", "[B]", "rollout", "which of several policies (`policies`) sampled the row's turns", '"solver"'
    ),
    "unsampled": Field(
        "bool", "[B]", "rollout", "no turn of the episode is trained on, such as of an agent that calls nothing", "0"
    ),
    "advantage_share": Field(
        "float32", "[B, response]", "rollout", "factor of each token's advantage (env.credit)", "[1.0, 0.5, 0.5]"
    ),
    "env_error": Field("str", "[B]", "rollout", "text of the environment's failure; empty: none", '""'),
    "env_output": Field("str", "[B]", "rollout", "end of what an agent has printed; empty: nothing", '"2 of 3 passed"'),
    "transcript": Field("str", "[B]", "rollout", "text of all turns and observations", '"<call>..."'),
    "data_prompt_ids": Field(
        "int64", "[B, prompt]", "rollout", "the data's prompt, before the first observation", "[5, 9]"
    ),
    "data_prompt_text": Field("str", "[B]", "rollout", "the data's prompt as text", '"47+85="'),
    "data_image_patches": Field(
        "uint8", "[B, patches]", "rollout", "images of the data's prompt, as image_patches", "[[12, 40, ...]]"
    ),
    "data_image_grids": Field("int64", "[B, images]", "rollout", "as image_grids", "[[1, 2, 3]]"),
    "data_image_digests": Field("int64", "[B, images]", "rollout", "as image_digests", "[-8132]"),
    # -- fields that only robot episodes have
    "task": Field("str", "[B]", "rollout", "task of the simulator", '"reach"'),
    "trial": Field("int64", "[B]", "rollout", "number of the task's start state", "4"),
    "success": Field("bool", "[B]", "rollout", "the task was done", "1"),
    "finish_step": Field("int64", "[B]", "rollout", "number of environment steps that were executed", "118"),
    "max_steps": Field("int64", "[B]", "rollout", "the task's limit of environment steps", "400"),
    "progress": Field("float32", "[B]", "rollout", "share of the task that is done, 0 to 1", "0.8"),
    "call_progress": Field(
        "float32", "[B, calls]", "rollout", "share that is done after each policy call", "[0.3, 0.8]"
    ),
    "states": Field("float32", "[B, calls, D]", "rollout", "the state before each policy call", "[[0.1]]"),
    "chain": Field(
        "float32", "[B, calls, S + 1, K, D]", "rollout", "points of each call's denoising chain, noise first", "..."
    ),
    "end_state": Field("float32", "[B, D]", "rollout", "the state after the last policy call", "[0.3]"),
    "frames/": Field("uint8", "[B, calls, H, W, 3]", "rollout", "a camera's pictures before each call", "..."),
    "end_frames/": Field("uint8", "[B, H, W, 3]", "rollout", "a camera's picture after the last call", "..."),
    "clip/": Field(
        "uint8",
        "[B, frames, H, W, 3]",
        "rollout",
        "a camera's pictures of every environment step, for rewards; the policy never gets them",
        "...",
    ),
    # -- rewards
    "pending_reward": Field(
        "handle", "[B]", "reward_submit", "scores that are being computed; of this process only", "..."
    ),
    "model_score": Field("float32", "[B]", "model_score", "score of the reward model; NaN: too long for it", "0.7"),
    "rule_rewards": Field(
        "dict", "[B]", "rule_rewards", "results of the rewards beside a reward model's", '{"overall": 1.0}'
    ),
    "score": Field("float32", "[B]", "reward, total_reward, episode_reward", "score of the sample", "1.0"),
    "token_rewards": Field(
        "float32",
        "[B, response]",
        "reward, total_reward, episode_reward, overlong, kl_in_reward",
        "the score on the last token (or each turn's reward on the turn's last one), and penalties",
        "[0.0, 0.0, 1.0]",
    ),
    "reward_parts": Field(
        "float32", "[B, K]", "reward, total_reward", "parts of the score that the advantage uses", "[1.0, 0.5]"
    ),
    "running_baseline": Field(
        "float32", "[B]", "running_baseline", "mean score of the policy's samples before this one (RAE)", "0.31"
    ),
    # -- what models compute for the samples
    "old_logp": Field(
        "float32", "[B, response]", "old_logp, rollout_as_old", "log-probs before the update", "[-0.1, -0.7, 0.0]"
    ),
    "surplus_logp": Field(
        "float32",
        "[B, response]",
        "dynamic_sampling",
        "log-probs at the step that generated the sample, if it waited for this step; NaN: a fresh sample",
        "[nan, nan, nan]",
    ),
    "sum_pi_squared": Field(
        "float32", "[B, response]", "sum_pi_squared", "sum of pi(v)^2 over the vocabulary", "[0.8, 0.4, 1]"
    ),
    "surplus_sum_pi_squared": Field(
        "float32", "[B, response]", "dynamic_sampling", "sum_pi_squared, as surplus_logp", "[nan, nan, nan]"
    ),
    "ref_logp": Field("float32", "[B, response]", "ref_logp", "log-probs of the reference", "[-0.2, -0.9, 0.0]"),
    "ref_hidden": Field(
        _MODEL_DTYPE,
        "[B, response, hidden]",
        "ref_hidden",
        "the reference's state before each token, as teacher_hidden",
        "[[0.3, -1.2, ...], ...]",
    ),
    "mismatched_ref_logp": Field(
        "float32", "[B, mismatched]", "mismatched_ref_logp", "log-probs of the reference, of mismatched_ids", "[-7, -2]"
    ),
    "teacher_logp": Field("float32", "[B, response]", "teacher_logp", "log-probs of the teacher", "[-0.1, -0.2, 0.0]"),
    "teacher_topk": Field(
        "float32",
        "[B, response, k + 1, 2]",
        "teacher_topk",
        "ids and log-probs of the teacher's k likeliest tokens in the place of each token, then of all others together",
        "[[[21, -0.1], [-1, -2.4]], ...]",
    ),
    "teacher_hidden": Field(
        _MODEL_DTYPE,
        "[B, response, hidden]",
        "teacher_hidden",
        "the teacher's state before each token, which its output embedding turns into its distribution; of several "
        "teachers side by side, 0 for all but the sample's",
        "[[0.3, -1.2, ...], ...]",
    ),
    "values": Field(
        "float32", "[B, response]", "value", "returns that the critic predicts before the update", "[0.4, 0.5, 0.9]"
    ),
    VALUE_MASK: Field(
        "bool",
        "[B, response]",
        "call_value",
        "tokens at which the critic's values are read: the first of each policy call; missing: response_mask",
        "[1, 0, 0]",
    ),
    # -- inputs of the update
    "loss_mask": Field(
        "bool", "[B, response]", "rollout_correction", "response_mask without rejected tokens", "[1, 1, 0]"
    ),
    "is_weights": Field(
        "float32", "[B, response]", "rollout_correction", "importance weights pi_old / pi_rollout", "[1, 0.9, 1]"
    ),
    "keep": Field("bool", "[B]", "rollout_correction", "the sample counts in its group's baseline", "1"),
    "advantages": Field("float32", "[B, response]", "advantage", "advantage of each token", "[0.7, 0.7, 0.7]"),
    "returns": Field("float32", "[B, response]", "advantage", "the critic's targets", "[1.0, 1.0, 1.0]"),
    "ordinal": Field(
        "int",
        "[B]",
        "exchange between replicas, dynamic_sampling, replay, the buffer",
        "number of the sample's group among those of the step; missing: group k of replica r of d is number k * d + r",
        "12",
    ),
    "copies": Field("int64", "[B]", "resample", "how often the sample is trained on", "2"),
    "loss_weights": Field(
        "float32", "[B, response]", "actor_train", "each token's share in the loss of its mini-batch", "[0.1, 0.1, 0.1]"
    ),
    "echo_weights": Field(
        "float32", "[B, response]", "actor_train", "share of each of the environment's tokens in ECHO", "[0, 0, 0.5]"
    ),
    "expert_weights": Field(
        "float32", "[B, response]", "actor_train", "share of each expert token in their cross-entropy", "[0, 0, 0]"
    ),
    "value_weights": Field(
        "float32", "[B, response]", "critic_train", "each token's share in the value loss", "[0.1, 0.1, 0.1]"
    ),
}


#: Names in the checkpoints of older versions -> present names.
_RENAMED = {"drawn_logp": "surplus_logp", "drawn_sum_pi_squared": "surplus_sum_pi_squared"}


def current_name(name: str) -> str:
    """Return the present name of a stored field, which may have the form node/field.

    >>> current_name("drawn_logp"), current_name("rollout/drawn_logp"), current_name("uid")
    ('surplus_logp', 'rollout/surplus_logp', 'uid')
    """
    node, slash, field = name.rpartition("/")
    return f"{node}{slash}{_RENAMED.get(field, field)}"


def own_places(samples: Batch) -> list[int]:
    """Return the row numbers of the samples that the policy generated, which are all without `data.experts`."""
    if SOURCE not in samples:
        return list(range(len(samples)))
    return [place for place, source in enumerate(samples[SOURCE]) if source != EXPERT]


_HEAD = """# Fields of a batch

`python -m megarl.data.fields > docs/fields.md` writes this page. A jagged field has as many entries per sample as it
has tokens of the prompt or the response, turns, policy calls, or runs of tokens of the same weights. A stage of your
own may add fields under other names.
"""


def known(name: str) -> Field | None:
    """Return the field of that name (`prefix/CAMERA` for fields per camera); None for a user's field."""
    prefix, slash, _ = name.partition("/")
    return FIELDS.get(prefix + slash)


def page() -> str:
    """Return docs/fields.md: all fields as a table in Markdown."""
    rows = [
        f"| `{name}{'CAMERA' if name.endswith('/') else ''}` | {field.form} | {field.writer} | {field.meaning} | "
        f"`{field.example}` |"
        for name, field in FIELDS.items()
    ]
    head = ["| field | form | written by | meaning | of one sample |", "|---|---|---|---|---|"]
    return "\n".join([_HEAD, *head, *rows])


if __name__ == "__main__":
    print(page())
