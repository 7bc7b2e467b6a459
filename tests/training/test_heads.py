"""Log-probs over some columns of the vocabulary, wherever tensor parallelism has put them, against float64."""

from types import SimpleNamespace

import pytest
import torch

from megarl.config.model import ParallelConfig
from tests.dist import fresh_layout, run_distributed

ROWS, HIDDEN, VOCAB = 11, 16, 53
#: Of two ranks the first has 27 columns: on both, one column on the second, on the first only, on the second only, all.
COLUMNS = [(10, 40), (12, 28), (3, 20), (30, 50), None]


def _errors(parallel: dict) -> dict[str, list[float]]:
    """Errors of log-probs, entropies, and gradients of hidden states and of this rank's rows of the head."""
    from megarl.training.heads import LogProbs

    layout = fresh_layout(ParallelConfig(**parallel))
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, whole, weights, places = draw(20, HIDDEN), draw(VOCAB, HIDDEN), draw(2, ROWS), torch.arange(3, 3 + ROWS)
    per_rank = -(-VOCAB // layout.tp_size)
    start = layout.tp_rank * per_rank
    own = (start, min(start + per_rank, VOCAB))
    errors = {}
    for columns in COLUMNS:
        first, last = columns or (0, VOCAB)
        targets = torch.randint(first, last, (ROWS,), generator=generator)
        mine, head = (x.clone().requires_grad_() for x in (hidden, whole[slice(*own)]))
        model = SimpleNamespace(
            config=SimpleNamespace(sequence_parallel=False), lm_head_weight=head, vocab_range=own, logit_cap=None
        )
        found = LogProbs(0.7, 4, layout.tp_group, columns=columns)(
            mine, model, SimpleNamespace(rows=places, targets=targets, kept_tokens=None)
        )
        (weights * torch.stack(found)).sum().backward()
        exact_hidden, exact_head = hidden.clone().requires_grad_(), whole.clone().requires_grad_()
        logp = ((exact_hidden[places] @ exact_head.T)[:, first:last] / 0.7).log_softmax(-1)
        expected = logp.gather(1, targets[:, None] - first)[:, 0], -(logp.exp() * logp).sum(-1)
        (weights * torch.stack(expected)).sum().backward()
        pairs = [*zip(found, expected, strict=True), (mine.grad, exact_hidden.grad)]
        pairs.append((head.grad, exact_head.grad[slice(*own)]))
        errors[str(columns)] = [(a - b).abs().max().item() for a, b in pairs]
    return errors


@pytest.mark.procs
@pytest.mark.parametrize("tp", [1, 2])
def test_columns_of_the_vocabulary(tp):
    for errors in run_distributed(_errors, tp, 60, {"tp": tp}):
        for columns, found in errors.items():
            assert max(found) < 1e-12, (columns, found)
