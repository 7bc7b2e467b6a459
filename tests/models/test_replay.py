"""Replay of routes: what the embedded engine records, and a model that uses it although its routers have changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megarl.data.batch import Batch, Jagged
from megarl.data.image_set import fields_of_sets
from megarl.data.routes import RouteError, RouteForm, continued
from megarl.data.tensor_text import from_text, to_text
from megarl.models.hf import encoder_of, route_form
from megarl.models.packing import pack_stream
from megarl.rollout.engine import Completion, Request
from megarl.training import microbatch
from megarl.training.sequence_layout import TextLayout
from megarl.training.vlm_sequences import ImageLayout
from tests.dist import single_process
from tests.rollout.cases import STOP, build, engine, requests_for, sampled


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def logprobs(chunk, prompt: list[int], response: list[int], routes: torch.Tensor | None) -> torch.Tensor:
    """Log-probs of a response, with these routes [tokens - 1, layers * chosen]."""
    ids = torch.tensor(prompt + response)[:-1]
    stream = pack_stream([len(ids)])
    stream.params.routes = routes
    hidden = chunk(stream.input_ids(ids), stream.position_ids, None, packed_seq_params=stream.params)
    logits = F.linear(hidden[len(prompt) - 1 :, 0], chunk.lm_head_weight)
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
        routed = torch.stack(rows)[:, None]
        return routed if layer.shared_experts is None else routed + layer.shared_experts(hidden), None

    return forward


def packed_logprobs(chunk, samples: list[tuple[Request, Completion]], *, replays: bool) -> torch.Tensor:
    """Log-probs of all responses from one packed stream, as training computes them."""
    form, encoder = route_form(chunk.hf_config), encoder_of(chunk.hf_config)
    fields = {
        "prompt_ids": Jagged.from_list([request.prompt_ids for request, _ in samples], dtype=torch.int64),
        "response_ids": Jagged.from_list([done.token_ids for _, done in samples], dtype=torch.int64),
    }
    sequences = TextLayout(routes=form)
    if encoder is not None:
        fields |= fields_of_sets([request.images for request, _ in samples], 3 * encoder.patch**2)
        sequences = ImageLayout(encoder, routes=form)
    if replays:
        lengths = [len(request.prompt_ids) + len(done.token_ids) - 1 for request, done in samples]
        fields["routes"] = form.field([done.routes for _, done in samples], lengths, lengths)
    cpu = torch.device("cpu")
    micro = microbatch.build(Batch(fields), range(len(samples)), single_process(), cpu, None, sequences)
    hidden = chunk(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
    logits = F.linear(hidden[micro.rows, 0], chunk.lm_head_weight)
    return torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]


@pytest.mark.parametrize(
    ("model", "expert"),
    [
        ("qwen3_vl_moe", swiglu),
        ("gpt_oss", clamped),
        pytest.param("qwen3_moe", swiglu, marks=pytest.mark.campaign("families")),
        pytest.param("qwen3_5_moe", swiglu, marks=pytest.mark.campaign("families")),
    ],
)
def test_a_model_with_other_routers_follows_the_recorded_routes(model, expert, monkeypatch):
    """Also in one stream of all samples, and at the features of images. Training is in float64."""
    hf = {"num_hidden_layers": 3, "mlp_only_layers": [1]} if model == "qwen3_moe" else {}
    ((decoded,), (chunk,)) = (build(model, dtype=dtype, hf=hf) for dtype in (torch.float32, torch.float64))
    chunk.load_state_dict(decoded.state_dict())
    requests = requests_for(chunk.hf_config, count=4, n=2)
    groups = engine([decoded], max_running=5, replay_routes=True).generate(requests, sampled(max_new_tokens=12), STOP)
    samples = [(request, done) for request, group in zip(requests, groups, strict=True) for done in group]
    generated = torch.tensor([value for _, done in samples for value in done.logprobs], dtype=torch.float64)
    torch.testing.assert_close(packed_logprobs(chunk, samples, replays=True), generated, atol=2e-5, rtol=0)

    sparse = [layer.mlp for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    assert {done.routes.shape[1] for _, done in samples} == {2 * len(sparse)}
    with torch.no_grad():
        for mlp in sparse:
            mlp.router.weight.add_(torch.randn_like(mlp.router.weight))
    replayed = packed_logprobs(chunk, samples, replays=True)
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(replayed.sum(), parameters)
    own = packed_logprobs(chunk, samples, replays=False)
    assert (own - replayed).abs().max() > 0.05  # otherwise the routers would have chosen the same experts anyway

    routes = torch.cat([done.routes for _, done in samples]).long().split(2, 1)
    for mlp, chosen in zip(sparse, routes, strict=True):
        monkeypatch.setattr(mlp, "forward", brute_force(mlp, chosen, expert))
    oracle = packed_logprobs(chunk, samples, replays=False)
    torch.testing.assert_close(replayed, oracle)
    for gradient, expected in zip(gradients, torch.autograd.grad(oracle.sum(), parameters), strict=True):
        torch.testing.assert_close(gradient, expected)


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
