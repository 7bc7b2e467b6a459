"""The token sequence of a policy call: its prompt, and the columns of pictures, state and actions.

    [BOS] [patches of all cameras] [state] [rest of the prompt] [K * D slots] [stop]

A slot is the column of one action token. The logits that predict it are one column earlier, as in any language model.
The two kinds of policies differ in the input of a slot:

    openvla-oft     a zero embedding; all slots are predicted in one pass with attention in both directions, and the
                    sequence ends with the stop token as in training
    openvla         the sampled token; slots are predicted one after another with causal attention, without stop token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.system.errors import ConfigError


@dataclass(frozen=True)
class PolicyFamily:
    """The prompt and sequence conventions that a family of policies was trained with."""

    # template of the prompt; `{task}` is the instruction
    template: str = "In: What action should the robot take to {task}?\nOut:"
    lower: bool = True  # whether the instruction is written in lower case
    # token that ends the prompt, and is added if the tokenizer does not add it; None: no such token. Llama's tokenizer
    # turns the space after `Out:` in training into 29871, an empty token.
    last_token: int | None = 29871
    stop_token: int = 2  # token that follows the action slots if all slots are predicted in one pass
    parallel: bool = True  # whether the slots of a call are predicted in one pass


#: The name of the family of policies that denoise their actions (flow matching).
FLOW = "pi0"

#: Name of a family of policies -> how it writes prompts and predicts actions. `small`: new policies with a tokenizer of
#: their own, whose prompt is only the instruction. `pi0` predicts no tokens (megarl/robots/models/flow).
FAMILIES = {
    "openvla-oft": PolicyFamily(),
    "openvla": PolicyFamily(parallel=False),
    "small": PolicyFamily(template="{task}", last_token=None),
    FLOW: PolicyFamily(template="{task}", last_token=None),
}


def prompt_text(instruction: str, family: PolicyFamily) -> str:
    """Return the prompt of the policy as text.

    >>> prompt_text("Put the Bowl on the stove", PolicyFamily())
    'In: What action should the robot take to put the bowl on the stove?\\nOut:'
    """
    return family.template.replace("{task}", instruction.lower() if family.lower else instruction)


def prompt_ids(instruction: str, family: PolicyFamily, tokenizer: Callable[..., Any]) -> list[int]:
    """Return the tokens of the prompt, with the tokenizer's BOS first and the family's last token at the end, each
    once.
    """
    ids = [int(token) for token in tokenizer(prompt_text(instruction, family))["input_ids"]]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in ids:
        raise ConfigError(
            "the tokenizer has no token for a part of the policy's prompt",
            where="model.tokenizer",
            found=prompt_text(instruction, family),
            allowed="its words or characters",
            fix="use the policy's own tokenizer, or add them to that of a new policy ('words:...', 'chars:...')",
        )
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        raise ConfigError(
            "the tokenizer has no BOS token",
            where="model.tokenizer",
            found="bos_token: null",
            allowed="a tokenizer with a bos_token; the pictures of a policy call stand after it",
            fix="use the policy's own tokenizer",
        )
    if ids[:1] != [bos]:
        ids.insert(0, bos)
    if family.last_token is not None and ids[-1] != family.last_token:
        ids.append(family.last_token)
    return ids


@dataclass(frozen=True)
class CallLayout:
    """Which columns of a policy call's token sequence hold prompt, image patches and actions.

    >>> layout = CallLayout(prompt=3, patches=4, dim=2, chunk=2)
    >>> layout.visual, layout.text, layout.slots, layout.predictors, layout.stop, layout.length
    (slice(1, 5, None), slice(5, 7, None), slice(7, 11, None), slice(6, 10, None), 11, 12)
    """

    prompt: int  # tokens of the prompt, including BOS
    patches: int  # patches of one picture
    dim: int  # number of values per action, D
    chunk: int  # number of actions per call, K
    cameras: int = 1  # number of pictures per call
    state: bool = False  # whether one position of the input sequence holds the robot's own state
    parallel: bool = True  # whether one pass predicts all action tokens; otherwise one after another

    def __post_init__(self) -> None:
        # The shortest prompt is BOS, which the pictures follow, and a token that predicts the first action token.
        least = {"prompt": 2, "patches": 1, "dim": 1, "chunk": 1, "cameras": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} of a policy call must be at least {smallest}, got {getattr(self, name)}")

    @property
    def actions(self) -> int:
        """Number of action tokens of a call, K * D."""
        return self.chunk * self.dim

    @property
    def visual(self) -> slice:
        """Columns of the token sequence that hold image patches, camera after camera."""
        return slice(1, 1 + self.patches * self.cameras)

    @property
    def state_at(self) -> int | None:
        """Column of the token sequence that holds the robot's own state; None: the policy does not read it."""
        return self.visual.stop if self.state else None

    @property
    def text(self) -> slice:
        """Columns of the token sequence that hold the prompt without BOS, which is column 0."""
        start = self.visual.stop + self.state
        return slice(start, start + self.prompt - 1)

    @property
    def slots(self) -> slice:
        """Columns of the action tokens: number d of action k is `slots.start + k * dim + d`."""
        return slice(self.text.stop, self.text.stop + self.actions)

    @property
    def predictors(self) -> slice:
        """Columns whose logits predict the action tokens, in the order of the tokens."""
        return slice(self.slots.start - 1, self.slots.stop - 1)

    @property
    def stop(self) -> int | None:
        """Column of the stop token; None: there is none."""
        return self.slots.stop if self.parallel else None

    @property
    def length(self) -> int:
        """Number of columns of the sequence."""
        return self.slots.stop + self.parallel
