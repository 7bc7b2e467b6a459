"""Reward functions of several policies: a policy's conversations are scored by its own function, or by the recipe's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.rewards.parts import Rewards, Submitted, located
from megarl.rewards.scoring import Result, Sample

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_POLICY = "policy"  # the key of a sample's dict that holds the name of its policy


@dataclass(frozen=True, eq=False)
class SubmittedByPolicy(Submitted):
    """A batch of samples of several policies that is being scored."""

    # by policy, the positions of its samples in the batch and their submission; under the empty name, those of all
    # policies without a reward function of their own
    parts: Mapping[str, tuple[list[int], Submitted]] = field(default_factory=dict)


class PolicyRewards(Rewards):
    """Scores each sample with the reward function of its policy, or with the section `reward` if the policy has none.

    Raises:
        ConfigError: a function cannot be found or loaded, or does not accept its arguments.
    """

    def __init__(self, config: RunConfig) -> None:
        self._own: dict[str, Rewards] = {}
        super().__init__(config.reward)
        try:
            for name, section in config.policy_rewards.items():
                with located(f"policies.{name}.reward"):
                    self._own[name] = Rewards(section)
        except BaseException:
            self.close()
            raise

    @property
    def uses_images(self) -> bool:
        """Whether a function uses the images of samples."""
        return super().uses_images or any(rewards.uses_images for rewards in self._own.values())

    def submit(self, samples: list[Sample], images: Sequence[list[str]] | None = None) -> SubmittedByPolicy:
        """Start scoring a batch and return the handle for `result`; arguments are those of `Rewards.submit`."""
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            name = sample.get(_POLICY, "")
            places.setdefault(name if name in self._own else "", []).append(place)
        parts: dict[str, tuple[list[int], Submitted]] = {}
        for name, numbers in places.items():
            submit = self._own[name].submit if name else super().submit
            shown = None if images is None else [images[number] for number in numbers]
            parts[name] = numbers, submit([samples[number] for number in numbers], shown)
        handles = {f"{name}/{label}": h for name, (_, part) in parts.items() for label, h in part.handles.items()}
        return SubmittedByPolicy(handles, len(samples), parts)

    def result(self, handle: Submitted) -> list[Result]:
        """Wait until a batch is scored; return one dict per sample in the batch's order, as `Rewards.result` does."""
        assert isinstance(handle, SubmittedByPolicy), "the batch was submitted here"
        results: dict[int, Result] = {}
        for name, (places, part) in handle.parts.items():
            result = self._own[name].result if name else super().result
            with located(f"policies.{name}.reward" if name else "reward"):
                results |= zip(places, result(part), strict=True)
        return [results[place] for place in range(handle.samples)]

    def close(self) -> None:
        """Stop all threads and processes."""
        super().close()
        for rewards in self._own.values():
            rewards.close()
