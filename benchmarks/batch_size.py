"""Does the decoupled loss depend on the batch size? `python -m megarl.benchmarks.batch_size`.

A policy of 512 numbers learns to name four letters for a random prompt, with megarl's estimator, correction and loss.
Its samples come from weights that are a fixed number of prompts old, so that a smaller batch means more steps of age.
Learning rate and Adam's decay rates follow the batch size as in "Batch size invariance for policy optimization"
(arXiv 2110.00641): lr * sqrt(c) and beta ** c for a batch c times as large. A row is a batch size; if the loss does not
depend on it, all rows of a column are alike. Cells are held-out scores after a quarter, a half and all of the prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque

import torch
from torch import Tensor

from megarl.algorithms.correction import correct
from megarl.algorithms.losses.base import DualClipSettings
from megarl.algorithms.losses.ppo import ppo

LENGTH, LETTERS, WIDTH = 4, 8, 16
GROUP = 8  # samples of a prompt
CLIP = DualClipSettings(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
#: How pi_old and the weights of tokens are chosen, by the name of a preset.
ARMS = ("decoupled_token_is", "ppo_is_bypass", "disabled")


class Task:
    """Random prompts, and for each the letters that a hidden matrix names."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self._answers = torch.randn(LENGTH, LETTERS, WIDTH, generator=self.rng)
        self._held_out = self.draw(512)

    def draw(self, prompts: int) -> tuple[Tensor, Tensor]:
        """Return prompts [B, width], and their answers [B, length]."""
        x = torch.randn(prompts, WIDTH, generator=self.rng)
        return x, self._answers.matmul(x.T).argmax(1).T

    def score(self, weights: Tensor) -> float:
        """Return the expected share of right letters on held-out prompts."""
        x, answers = self._held_out
        return float(log_probs(weights, x).gather(2, answers[..., None]).exp().mean())


def log_probs(weights: Tensor, x: Tensor) -> Tensor:
    """Return log-probs [B, length, letters] of prompts [B, width] under weights [length, letters, width]."""
    return torch.einsum("tkd,bd->btk", weights, x).log_softmax(2)


def train(arm: str, batch: int, options: argparse.Namespace, seed: int) -> list[float]:
    """Return the held-out score after a quarter, a half and all of the prompts."""
    task, c = Task(seed), batch / options.base
    weights = torch.zeros(LENGTH, LETTERS, WIDTH, requires_grad=True)
    if options.unscaled:
        c = 1.0
    optimizer = torch.optim.Adam([weights], lr=options.lr * c**0.5, betas=(0.9**c, 0.95**c))
    steps, age = options.prompts // batch, options.age // batch
    history: deque[Tensor] = deque([weights.detach().clone()], maxlen=age + 1)
    scores = []
    for step in range(1, steps + 1):
        x, answers = task.draw(batch)
        with torch.no_grad():
            rollout = log_probs(history[0], x).repeat_interleave(GROUP, 0)
            letters = torch.multinomial(rollout.exp().view(-1, LETTERS), 1, generator=task.rng).view(-1, LENGTH, 1)
            rewards = (letters[..., 0] == answers.repeat_interleave(GROUP, 0)).float().mean(1).view(batch, GROUP)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
            advantages = advantages.view(-1, 1).expand(-1, LENGTH)
            rollout = rollout.gather(2, letters)[..., 0]
        logp = log_probs(weights, x).repeat_interleave(GROUP, 0).gather(2, letters)[..., 0]
        mask = torch.ones_like(logp, dtype=torch.bool)
        level = "token" if arm == "decoupled_token_is" else "none"
        factors = correct(logp, rollout, mask, is_level=level, is_threshold=2.0).weights.view_as(logp)
        old = rollout if arm == "ppo_is_bypass" else logp.detach()
        loss, _ = ppo(logp, old, advantages, mask, CLIP)
        optimizer.zero_grad()
        (loss * factors).mean().backward()
        optimizer.step()
        history.append(weights.detach().clone())
        if step in (steps // 4, steps // 2, steps):
            scores.append(task.score(weights.detach()))
    return scores


def main(argv: list[str] | None = None) -> int:
    """Print a table of held-out scores by batch size and arm."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.batch_size", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="prompts per step")
    parser.add_argument("--age", type=int, default=1024, help="age of the weights that generate, in prompts")
    parser.add_argument("--prompts", type=int, default=8192, help="prompts of a run")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the base batch")
    parser.add_argument("--base", type=int, default=32, help="batch to which --lr belongs")
    parser.add_argument("--unscaled", action="store_true", help="the same learning rate and decay for all batches")
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| prompts per step | age in steps | " + " | ".join(ARMS) + " |")
    print("|---" * (2 + len(ARMS)) + "|")
    for batch in options.batches:
        cells = []
        for arm in ARMS:
            runs = [train(arm, batch, options, seed) for seed in range(options.seeds)]
            columns = [[100 * score for score in column] for column in zip(*runs, strict=True)]
            spread = statistics.stdev(columns[-1]) / options.seeds**0.5
            cells.append(", ".join(f"{statistics.mean(column):.1f}" for column in columns) + f" (± {spread:.1f})")
        print(f"| {batch} | {options.age // batch} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
