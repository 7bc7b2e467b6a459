"""The work of a run: seconds of its samples and of its steps."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

from megarl.rollout.seeds import env_seed, sample_seed

NAME = "work.json"
SEED = 0  # of the run
TOKEN_S = 0.05


@dataclass(frozen=True)
class Work:
    """The seconds of a run. Those of a sample are log-normal, in whole tokens, and follow from its seed.

    Attributes:
        groups: groups of a step.
        samples: samples of a group.
        slots: samples that are sampled side by side, at most.
        mean_s: mean seconds of a sample, if none were cut off.
        sigma: standard deviation of the logarithm of a sample's seconds.
        longest: tokens of a sample, at most.
        training_s: seconds of training of a step.
        thinks: an environment takes these seconds, to answer a turn of one token; else decoding does.
    """

    groups: int
    samples: int
    slots: int
    mean_s: float
    sigma: float
    longest: int
    training_s: float
    thinks: bool = False

    def tokens(self, seed: int) -> int:
        """Return the tokens of the sample with this seed; each takes `TOKEN_S`."""
        normal = NormalDist().inv_cdf(random.Random(seed).uniform(1e-9, 1 - 1e-9))
        seconds = self.mean_s * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return max(1, min(self.longest, round(seconds / TOKEN_S)))

    def seconds(self, number: int) -> list[float]:
        """Return the seconds of the samples of prompt `number` of the run, the row with this number of its data."""
        uid = f"train-0-{number}"
        if self.thinks:
            return [self.answer_s(env_seed(SEED, uid), sample) + TOKEN_S for sample in range(self.samples)]
        return [TOKEN_S * self.tokens(sample_seed(SEED, uid, sample)) for sample in range(self.samples)]

    def answer_s(self, seed: int, sample: int) -> float:
        """Return the seconds of the environment with this seed, for a sample of its group."""
        return TOKEN_S * self.tokens(seed + sample)

    def step_seconds(self, step: int) -> list[float]:
        """Return the seconds of all samples of a step (from 1) that generates its own prompts, in order."""
        return [s for number in range((step - 1) * self.groups, step * self.groups) for s in self.seconds(number)]

    def write(self, run_dir: Path) -> None:
        """Leave it in the run folder, for the workers."""
        (run_dir / NAME).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> Work:
        """Read the work that `write` left."""
        return cls(**json.loads((run_dir / NAME).read_text()))


#: `balanced`: training takes 3 s, and so do the samples of a step, side by side, on average. `tails`: training takes
#: 2 s, and a sample 0.9 s on average; because of a few of them the samples of a step take 5 s. `drawing`: training
#: takes 1.5 s and the samples of a step 2.7 s, so that training in order waits, however far ahead it runs.
#: `environments`: as `tails`, and it is the environment that takes the time, up to 4 s.
CASES = {
    "balanced": Work(groups=8, samples=4, slots=32, mean_s=1.0, sigma=0.6, longest=160, training_s=3.0),
    "tails": Work(groups=8, samples=4, slots=32, mean_s=0.9, sigma=1.0, longest=160, training_s=2.0),
    "drawing": Work(groups=8, samples=4, slots=32, mean_s=0.7, sigma=0.7, longest=160, training_s=1.5),
    "environments": Work(groups=8, samples=4, slots=32, mean_s=0.9, sigma=1.0, longest=80, training_s=2.0, thinks=True),
}
