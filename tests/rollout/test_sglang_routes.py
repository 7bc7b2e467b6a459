"""Routes that a real server returns with its samples are those of the training model, and replay there."""

from __future__ import annotations

import base64

import pytest
import torch

from megarl.config.sglang import SGLangConfig
from megarl.data.routes import RouteForm
from megarl.models.hf import route_form
from megarl.models.packing import pack_stream
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sglang.routes import SWITCH, read_routes, returning_routes
from tests.dist import single_process
from tests.models.test_replay import logprobs
from tests.models.tiny import build_tiny, save_tiny
from tests.rollout.cases import sampled
from tests.rollout.forked import forked_servers
from tests.rollout.servers import engine, start


def test_layers_without_experts_are_left_out_and_other_routes_are_refused():
    form = RouteForm((False, True), chosen=2, experts=4)
    numbers = torch.tensor([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], dtype=torch.int32)
    meta = {"routed_experts": base64.b64encode(numbers.numpy().tobytes()).decode()}
    assert read_routes(meta, form, tokens=3).tolist() == [[3, 1], [2, 0]]
    assert read_routes({}, form, tokens=3) is None
    unwritten = {"routed_experts": base64.b64encode(bytes(8 * 4)).decode()}
    with pytest.raises(ValueError, match="of token 0 in expert layer 0; expected: 2 different experts"):
        read_routes(unwritten, form, tokens=3)
    with pytest.raises(ValueError, match="8 numbers as routes"):
        read_routes(meta, form, tokens=4)
    with pytest.raises(ValueError, match="experts 0 to 3, but the model has 3"):
        read_routes(meta, RouteForm((False, True), chosen=2, experts=3), tokens=3)
    assert returning_routes(SGLangConfig(extra_args=["--x"])).extra_args == ["--x", SWITCH]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--a=1", "--b=-1"], "-1"),
        (["--b", "-1", "--c"], "-1"),
        (["--b=1", "--b=2"], "2"),
        (["--bb=1", "--a", "b"], None),
    ],
)
def test_a_further_argument_is_found_in_both_forms(arguments: list[str], value: str | None) -> None:
    assert SGLangConfig(extra_args=arguments).argument("--b") == value


def chosen_by(chunk, request: Request, done: Completion) -> torch.Tensor:
    """The experts [tokens, layers, chosen] that the training model itself chooses, in ascending order."""
    masks: list[torch.Tensor] = []
    routers = [layer.mlp.router for layer in chunk.decoder.layers]
    hooks = [router.register_forward_hook(lambda _, __, output: masks.append(output[1])) for router in routers]
    logprobs(chunk, request.prompt_ids, done.token_ids, None)
    for hook in hooks:
        hook.remove()
    return torch.stack([mask.nonzero()[:, 1].view(-1, 2) for mask in masks], 1)


@pytest.mark.procs
@pytest.mark.servers
@pytest.mark.timeout(300)
def test_routes_and_kept_tokens_of_a_real_server_replay(tmp_path):
    model = tmp_path / "model"
    save_tiny(model, "qwen3_moe", moe_intermediate_size=64)
    single_process()
    (chunk,) = build_tiny(model)
    requests = [Request([5, 6, 7, 8], [1, 2]), Request(list(range(20, 50)), [3])]
    with forked_servers(), start(tmp_path, model, extra_args=[SWITCH]) as fleet:
        served = engine(fleet)
        served.routes = route_form(chunk.hf_config)
        groups = served.generate(requests, sampled(max_new_tokens=12), [2])
        served.keeps_tokens, filters = True, sampled(max_new_tokens=12, top_k=9, top_p=0.9, temperature=0.8)
        filtered = served.generate(requests, filters, [2])
    for request, group in zip(requests, groups, strict=True):
        for done in group:
            assert done.routes.shape == (len(request.prompt_ids) + len(done.token_ids) - 1, 4 * 2)
            assert torch.equal(done.routes.unflatten(1, (4, 2)).long().sort(-1).values, chosen_by(chunk, request, done))
            replayed = logprobs(chunk, request.prompt_ids, done.token_ids, done.routes)
            torch.testing.assert_close(replayed, torch.tensor(done.logprobs), atol=1e-4, rtol=0)
    for request, group in zip(requests, filtered, strict=True):
        for done in group:
            assert 1 <= int(done.kept_tokens.counts.min()) <= int(done.kept_tokens.counts.max()) <= 9
            expected = kept_logprobs(chunk, request, done, 0.8)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


def kept_logprobs(chunk, request: Request, done: Completion, temperature: float) -> torch.Tensor:
    """Log-probs of a response among the tokens that the filters kept."""
    ids = torch.tensor([*request.prompt_ids, *done.token_ids])
    stream = pack_stream([len(ids)])
    with torch.no_grad():
        hidden = chunk(stream.input_ids(ids), stream.position_ids, None, packed_seq_params=stream.params)
        logits = chunk.logits(hidden[len(request.prompt_ids) - 1 : -1, 0]).double() / temperature
    rows = done.kept_tokens.padded().long()
    kept = logits.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf).logsumexp(1)
    return (logits.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0] - kept).float()
