"""Converts between a policy's action tokens and a robot's actions.

    tokens [..., K * D]     of one policy call: K actions of D numbers, one action after another
      | ActionTokens        the last tokens of the vocabulary are bins of -1 to 1
    numbers [..., K, D]     -1 to 1, as the policy learned them
      | ActionStatistics    the range that each number had in the demonstrations
    numbers [..., K, D]     in the demonstrations' units, grippers in the policy's convention
      | GripperRule         converts grippers to the simulator's convention
    actions [..., K, D]     as the simulator executes them

Behaviour cloning uses the inverse. Any K and D are possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.system.errors import ConfigError, DataError

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class ActionTokens:
    """The mapping between action tokens and numbers: OpenVLA's rule, which OpenVLA-OFT's discrete policies share.

    `bins` edges from -1 to 1, including both, divide the range into `bins` - 1 intervals. Token `vocab_size - 1 - i` is
    interval i, so the last token means the lowest numbers. The first of the `bins` tokens encodes only 1, and decodes
    to the last interval.

    >>> tokens = ActionTokens(vocab_size=32000)
    >>> tokens.encode([-1.0, 0.0, 1.0])
    array([31999, 31872, 31744])
    >>> tokens.columns(padded=32064)
    slice(31744, 32000, None)
    """

    vocab_size: int  # tokens of the tokenizer, without padding rows of the embedding
    bins: int = 256  # number of action tokens

    def __post_init__(self) -> None:
        if not 3 <= self.bins <= self.vocab_size:
            raise ConfigError(
                "the number of bins does not fit the vocabulary",
                where="bins",
                found=self.bins,
                allowed=f"3 to {self.vocab_size}, the size of the vocabulary",
            )

    @classmethod
    def of_checkpoint(cls, config: Mapping[str, Any], where: str) -> ActionTokens:
        """Read the mapping from the config.json of an OpenVLA checkpoint.

        Args:
            config: its content: `text_config.vocab_size`, which counts `pad_to_multiple_of` rows too many, and
                `n_action_bins`.
        """
        try:
            padded, padding = config["text_config"]["vocab_size"], config["pad_to_multiple_of"]
            return cls(padded - padding, config["n_action_bins"])
        except (KeyError, TypeError) as problem:
            raise ConfigError(
                f"cannot determine which tokens are actions: {problem}",
                where=where,
                allowed="a config.json with `text_config.vocab_size`, `pad_to_multiple_of` and `n_action_bins`",
                fix="use the config.json that belongs to the checkpoint",
            ) from None

    @property
    def start(self) -> int:
        """The first action token."""
        return self.vocab_size - self.bins

    @property
    def centres(self) -> NDArray[np.float64]:
        """The number to which each interval's token decodes, [bins - 1]."""
        edges = np.linspace(-1, 1, self.bins)
        return (edges[:-1] + edges[1:]) / 2

    def columns(self, padded: int) -> slice:
        """Return the columns of action tokens in logits [..., padded]; the j-th of them is token `start` + j."""
        if padded < self.vocab_size:
            raise ConfigError(
                "the logits have fewer columns than the vocabulary has tokens",
                where="vocab_size",
                found=padded,
                allowed=f"at least {self.vocab_size}, the size of the vocabulary",
            )
        return slice(self.start, self.vocab_size)

    def encode(self, numbers: ArrayLike) -> Tokens:
        """Return the tokens int64 of numbers, which are clipped to -1 to 1."""
        values = np.asarray(numbers)
        _refuse(
            values, ~np.isfinite(values), "a value of an action is not a finite number", "actions", "finite numbers"
        )
        edges = np.linspace(-1, 1, self.bins)
        return np.asarray(self.vocab_size - np.digitize(np.clip(values, -1, 1), edges), dtype=np.int64)

    def decode(self, tokens: ArrayLike) -> Floats:
        """Return the centres of the intervals that `tokens` stand for, float32 from -1 to 1."""
        ids = np.asarray(tokens)
        wrong = (ids < self.start) | (ids >= self.vocab_size)
        _refuse(ids, wrong, "a token is not an action token", "tokens", f"{self.start} to {self.vocab_size - 1}")
        interval = np.minimum(self.vocab_size - 1 - ids, self.bins - 2)
        return self.centres.astype(np.float32)[interval]


@dataclass(frozen=True)
class GripperRule:
    """The conversion of gripper numbers from the policy's convention to the simulator's."""

    # indices of the grippers in an action, counted from the end if negative; empty: nothing is converted
    dims: tuple[int, ...] = ()
    unit: bool = False  # the policy's numbers are from 0 to 1, the simulator's from -1 to 1
    binarise: bool = False  # the simulator gets the sign: -1 or 1, or 0 for exactly the middle, which moves nothing
    invert: bool = False  # whether the simulator has the opposite sign

    def to_simulator(self, actions: ArrayLike) -> Floats:
        """Return a copy of a policy's actions [..., D] in the simulator's convention."""
        actions = np.array(actions, dtype=np.float32)
        for place in self.dims:
            value = actions[..., place]
            value = 2 * value - 1 if self.unit else value
            value = np.sign(value) if self.binarise else value
            actions[..., place] = -value if self.invert else value
        return actions

    def to_policy(self, actions: ArrayLike) -> Floats:
        """Return a copy of demonstrations' actions [..., D] in the policy's convention instead of the simulator's."""
        actions = np.array(actions, dtype=np.float32)
        for place in self.dims:
            value = actions[..., place]
            value = -value if self.invert else value
            value = np.where(value >= 0, 1, -1) if self.binarise else value
            actions[..., place] = (value + 1) / 2 if self.unit else value
        return actions

    def mask(self, dim: int) -> list[bool]:
        """Return for each of an action's `dim` numbers whether it is normalised; with `unit` grippers are not."""
        grippers = {place % dim for place in self.dims} if self.unit else set()
        return [place not in grippers for place in range(dim)]


#: Values of `robot.gripper`. `libero`: its demonstrations and simulator use -1 for open and 1 for closed, OpenVLA's
#: policies 1 for open and 0 for closed. `none`: values are not converted, as for Meta-World and RoboTwin.
GRIPPER_RULES = {
    "libero": GripperRule(dims=(-1,), unit=True, binarise=True, invert=True),
    "none": GripperRule(),
}


@dataclass(frozen=True)
class ActionCodec:
    """Converts between the tokens of policy calls and the actions that a simulator executes."""

    tokens: ActionTokens  # which tokens of the vocabulary stand for which numbers
    # statistics of the actions in the policy's data set; every action has the same D numbers
    statistics: ActionStatistics
    gripper: GripperRule = GripperRule()  # the simulator's rule

    @property
    def dim(self) -> int:
        """Number of components of an action, D."""
        return self.statistics.dim

    def to_actions(self, tokens: ArrayLike) -> Floats:
        """Convert the action tokens [..., K * D] of policy calls to actions float32 [..., K, D] for the simulator."""
        ids = np.asarray(tokens)
        if ids.ndim == 0 or ids.shape[-1] % self.dim or not ids.shape[-1]:
            raise DataError(
                "the number of tokens is 0, or is not a multiple of the tokens of an action",
                where="tokens",
                found=f"shape {list(ids.shape)}",
                allowed=f"[..., K * {self.dim}], with K above 0: an action has {self.dim} numbers in the statistics",
            )
        numbers = self.tokens.decode(ids).reshape(*ids.shape[:-1], -1, self.dim)
        return self.gripper.to_simulator(self.statistics.denormalise(numbers))

    def to_tokens(self, actions: ArrayLike) -> Tokens:
        """Convert recorded actions [..., K, D] to action tokens, int64 [..., K * D], to train a policy on."""
        numbers = self.statistics.normalise(self.gripper.to_policy(actions))
        return self.tokens.encode(numbers.reshape(*numbers.shape[:-2], -1))


@dataclass(frozen=True)
class NumberCodec:
    """Converts between the normalised numbers that a policy predicts (about -1 to 1) and the actions that a simulator
    executes."""

    statistics: ActionStatistics
    gripper: GripperRule = GripperRule()

    @property
    def dim(self) -> int:
        """Number of components of an action, D."""
        return self.statistics.dim

    def to_actions(self, numbers: ArrayLike) -> Floats:
        """Convert a policy's normalised numbers [..., K, D] to actions for the simulator, float32."""
        return self.gripper.to_simulator(self.statistics.denormalise(np.asarray(numbers, np.float32)))

    def to_numbers(self, actions: ArrayLike) -> Floats:
        """Convert recorded actions [..., K, D] to normalised numbers to train a policy on, float32."""
        numbers = self.statistics.normalise(self.gripper.to_policy(actions))
        allowed = "finite numbers"
        _refuse(numbers, ~np.isfinite(numbers), "a value of an action is not a finite number", "actions", allowed)
        return numbers.astype(np.float32)


def _refuse(values: NDArray[Any], wrong: NDArray[np.bool_], what: str, name: str, allowed: str) -> None:
    """Raise DataError for the first of `values` that the mask `wrong` marks; the error names the value's place."""
    if not wrong.any():
        return
    place = tuple(int(number) for number in np.argwhere(wrong)[0])
    raise DataError(what, where=f"{name}{list(place)}", found=values[place].item(), allowed=allowed)
