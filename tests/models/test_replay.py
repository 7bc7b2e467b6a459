"""Replay of routes: what the embedded engine records, and a model that uses it although its routers have changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megarl.data.routes import RouteError, RouteForm, continued
from megarl.data.tensor_text import from_text, to_text
from megarl.models.packing import pack_stream
from tests.dist import single_process
from tests.rollout.cases import STOP, build, engine, make_requests, sampled


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def logprobs(chunk, prompt: list[int], response: list[int], routes: torch.Tensor | None) -> torch.Tensor:
    """Log-probs of a response, with these routes [tokens - 1, layers * chosen]."""
    ids = torch.tensor(prompt + response)[:-1]
    stream = pack_stream([len(ids)])
    stream.params.routes = routes
    hidden = chunk(stream.input_ids(ids), stream.position_ids, None, packed_seq_params=stream.params)
    logits = F.linear(hidden[len(prompt) - 1 :, 0], chunk.lm_head_weight).float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def swiglu(experts, number: int, token: torch.Tensor) -> torch.Tensor:
    gate, up = (experts.linear_fc1.stacked[number] @ token).chunk(2)
    return experts.linear_fc2.stacked[number] @ (F.silu(gate) * up)


def clamped(experts, number: int, token: torch.Tensor) -> torch.Tensor:
    inner = token @ experts.linear_fc1.weight[number] + experts.linear_fc1.bias[number]
    gate, up = inner[::2].clamp(max=1.5), inner[1::2].clamp(-1.5, 1.5)
    gated = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return gated @ experts.linear_fc2.weight[number] + experts.linear_fc2.bias[number]


def brute_force(layer, routes: torch.Tensor, expert):
    """Return a forward function of a layer with experts that evaluates the experts of every token one by one."""

    def forward(hidden: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        bias = 0 if layer.router.bias is None else layer.router.bias
        scores = torch.softmax(hidden[:, 0] @ layer.router.weight.t() + bias, -1)
        rows = []
        for token, score, experts in zip(hidden[:, 0], scores, routes.tolist(), strict=True):
            weights = score[experts] / score[experts].sum()
            rows.append(sum(w * expert(layer.experts, e, token) for w, e in zip(weights, experts, strict=True)))
        return torch.stack(rows)[:, None], None

    return forward


@pytest.mark.parametrize(
    ("model", "layers", "changes", "expert"),
    [("qwen3_moe", (0, 2), {"mlp_only_layers": [1]}, swiglu), ("gpt_oss", (0, 1), {}, clamped)],
)
def test_a_model_with_other_routers_follows_the_recorded_routes(model, layers, changes, expert, monkeypatch):
    chunks = build(model, hf={"num_hidden_layers": layers[-1] + 1, **changes})
    requests = make_requests(count=4)
    groups = engine(chunks, max_running=5, replay_routes=True).generate(requests, sampled(), STOP)
    (chunk,) = chunks
    samples = [(r.prompt_ids, done) for r, group in zip(requests, groups, strict=True) for done in group]
    for prompt, done in samples:
        assert done.routes.shape == (len(prompt) + len(done.token_ids) - 1, 2 * 2)
        same = logprobs(chunk, prompt, done.token_ids, done.routes)
        torch.testing.assert_close(same, torch.tensor(done.logprobs), atol=1e-5, rtol=0)

    routers = [layer.mlp.router.weight for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    with torch.no_grad():
        for weight in routers:
            weight.add_(torch.randn_like(weight))
    prompt, done = max(samples, key=lambda sample: len(sample[1].token_ids))
    replayed = logprobs(chunk, prompt, done.token_ids, done.routes)
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(replayed.sum(), parameters)
    own = logprobs(chunk, prompt, done.token_ids, None)
    assert (own - replayed).abs().max() > 0.05  # otherwise the routers would have chosen the same experts anyway

    for place, number in enumerate(layers):
        mlp, chosen = chunk.decoder.layers[number].mlp, done.routes[:, 2 * place : 2 * place + 2].long()
        monkeypatch.setattr(mlp, "forward", brute_force(mlp, chosen, expert))
    oracle = logprobs(chunk, prompt, done.token_ids, None)
    torch.testing.assert_close(replayed, oracle, atol=1e-5, rtol=0)
    for gradient, expected in zip(gradients, torch.autograd.grad(oracle.sum(), parameters), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)


def test_routes_are_complete_and_of_this_model():
    form = RouteForm((True, False), chosen=2, experts=300)
    assert (form.dtype, RouteForm((True,), 1, 255).dtype) == (torch.int16, torch.uint8)
    known = torch.tensor([[1, 299], [4, 5]], dtype=torch.int16)
    field = form.field([known, None], lengths=[3, 1], read=[2, 0])
    assert field.values.tolist() == [[1, 299], [4, 5], [300, 300], [300, 300]]
    for bad, read in ((known, 3), (known[:, :1], 2), (known.to(torch.uint8), 2), (None, 1)):
        with pytest.raises(RouteError, match=r"rollout\.replay_routes"):
            form.field([bad], lengths=[3], read=[read])


def test_known_routes_stay_and_survive_json():
    first = torch.tensor([[1, 2]], dtype=torch.uint8)
    later = torch.tensor([[3, 4], [5, 6]], dtype=torch.uint8)
    joined = continued(first, later)
    assert joined.tolist() == [[1, 2], [5, 6]]
    assert torch.equal(from_text(to_text(joined)), joined)
    assert from_text(to_text(None)) is None
