"""Multi-head latent attention against transformers' modules and a brute-force loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.models.layers.mla.training import rotate_end
from tests.dist import fresh_parallel, run_distributed, single_process
from tests.models.mla import SIZES, YARN, hf_name, latent_module, mixer_of, ours, stream_of, theirs

VARIANTS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "halves": {"rope_interleave": False},
    "direct queries": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "wide values": {"v_head_dim": 24},
}
LENGTHS = [5, 17, 1, 9]


def run_theirs(module: Any, rotary: Any, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the output of transformers' module [t, h], sequence by sequence."""
    out = []
    for x in hidden.split(lengths):
        future = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        out.append(module(x[None], rotary(x, torch.arange(len(x))[None]), future)[0][0])
    return torch.cat(out)


@pytest.fixture(scope="module", autouse=True)
def _process():
    single_process()
    fresh_parallel()


@pytest.mark.parametrize("lengths", [[13], LENGTHS], ids=["alone", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_output_and_all_gradients_equal_transformers(model_type, variant, lengths):
    config, module, rotary = theirs(model_type, VARIANTS[variant])
    hidden = torch.randn(sum(lengths), config.hidden_size, requires_grad=True)
    upstream = torch.randn(hidden.shape)
    expected = run_theirs(module, rotary, hidden, lengths)
    expected.backward(upstream)
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    latent = ours(config, module.state_dict(), torch.float32)
    x = hidden.detach().clone().requires_grad_()
    stream = stream_of(rotary, lengths, torch.float32)
    out = latent(x[:, None], packed_seq_params=stream.params)[0][:, 0]
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, hidden.grad, atol=1e-4, rtol=1e-4)
    for name, parameter in latent.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[hf_name(name)], atol=2e-4, rtol=1e-4, msg=name)


def brute_force(
    weights: dict[str, torch.Tensor], config: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
):
    """Return the attention's output for one sequence in float64, one query, head and pair of numbers at a time."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    value, rank = config.v_head_dim, config.kv_lora_rank

    def norm(x, weight):
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weight

    def turn(x, at):
        out = []
        for pair in range(rope // 2):
            angle = complex(cos[at, pair], sin[at, pair])
            out.append(complex(x[2 * pair], x[2 * pair + 1]) * angle)
        return torch.tensor([[z.real, z.imag] for z in out], dtype=torch.float64).flatten()

    queries, keys, values = [], [], []
    for at, x in enumerate(hidden.double()):
        q = w["q_b_proj.weight"] @ norm(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"])
        compressed = w["kv_a_proj_with_mqa.weight"] @ x
        expanded = (w["kv_b_proj.weight"] @ norm(compressed[:rank], w["kv_a_layernorm.weight"])).view(heads, -1)
        q = q.view(heads, nope + rope)
        shared = turn(compressed[rank:], at)
        queries.append([torch.cat([head[:nope], turn(head[nope:], at)]) for head in q])
        keys.append([torch.cat([head[:nope], shared]) for head in expanded])
        values.append([head[nope : nope + value] for head in expanded])
    out = []
    for at in range(len(hidden)):
        contexts = []
        for head in range(heads):
            scores = [queries[at][head] @ keys[seen][head] * mixer_of(config).scale for seen in range(at + 1)]
            chances = torch.stack(scores).softmax(0)
            contexts.append(sum(chance * values[seen][head] for seen, chance in enumerate(chances)))
        out.append(w["o_proj.weight"] @ torch.cat(contexts))
    return torch.stack(out)


def test_output_equals_a_loop_in_float64():
    config, module, rotary = theirs("deepseek_v3", {"rope_parameters": YARN, "rms_norm_eps": 1e-2})
    weights = {name: tensor.double() for name, tensor in module.state_dict().items()}
    hidden = torch.randn(7, config.hidden_size, dtype=torch.float64)
    stream = stream_of(rotary, [7], torch.float64)
    out = ours(config, weights, torch.float64)(hidden[:, None], packed_seq_params=stream.params)[0][:, 0]
    expected = brute_force(weights, config, hidden, *stream.params.cache["rope"])
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-11)


def test_the_scale_of_yarn_is_that_of_transformers():
    config, module, _ = theirs("deepseek_v3", {"rope_parameters": YARN})
    assert mixer_of(config).scale == pytest.approx(module.scaling, rel=1e-12)
    assert mixer_of(config).scale > (12 + 8) ** -0.5


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_gradient_of_rope_is_the_opposite_rotation(interleaved):
    cos, sin = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))
    x = torch.randn(5, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate_end(x, cos, sin, interleaved), x)
    torch.testing.assert_close(rotate_end(x, cos, sin, interleaved)[..., :4], x[..., :4])


def test_recomputed_attention_gives_the_same_gradients():
    config, module, rotary = theirs("deepseek_v3", {})
    found = []
    for recomputed in (False, True):
        latent = ours(config, module.state_dict(), torch.float32)
        latent._recompute = recomputed
        hidden = torch.ones(4, 1, config.hidden_size).cumsum(0).requires_grad_()
        latent(hidden, packed_seq_params=stream_of(rotary, [4], torch.float32).params)[0].square().sum().backward()
        found.append([hidden.grad, *(parameter.grad for parameter in latent.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("changes", [{}, {"v_head_dim": 20}, {"v_head_dim": 24, "q_lora_rank": None}])
def test_the_planner_counts_what_is_kept_for_the_backward_pass(changes):
    latent, rotary = latent_module("deepseek_v3", changes)
    tokens, kept = 1100, {}  # longer sequences than those whose probabilities are kept
    stream, hidden = stream_of(rotary, [tokens], torch.float32), torch.randn(tokens, 1, SIZES["hidden_size"])

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = latent(hidden.requires_grad_(), packed_seq_params=stream.params)[0]
    assert out.requires_grad
    for tensor in (*latent.parameters(), *stream.params.cache["rope"], hidden):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    row_sums = latent.mixer.heads
    assert sum(kept.values()) / 4 / tokens - row_sums == latent.mixer.kept_elements(1)


LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sp": True},
    "cp2": {"cp": 2},
    "tp2xcp2": {"tp": 2, "cp": 2},
    "tp2xcp2+sp": {"tp": 2, "cp": 2, "sp": True},
}


def layout_cases(layouts: dict[str, dict[str, Any]], changes: dict[str, Any]) -> dict[str, Any]:
    """Return, for each layout, the whole output and the whole gradients of input and parameters."""
    return {name: layout_case(layout, changes) for name, layout in layouts.items()}


def layout_case(layout: dict[str, Any], changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    fresh_parallel(**{key: value for key, value in layout.items() if key != "sp"})
    config, module, rotary = theirs("deepseek_v3", changes)
    latent = ours(config, module.state_dict(), torch.float32, **layout)
    tp, tp_rank, split = layout.get("tp", 1), mpu.get_tensor_model_parallel_rank(), layout.get("sp", False)
    cp, cp_rank = layout.get("cp", 1), mpu.get_context_parallel_rank()
    stream = stream_of(rotary, LENGTHS, torch.float32, cp_size=cp, cp_rank=cp_rank, multiple=tp)
    whole, upstream = torch.randn(2, sum(LENGTHS), config.hidden_size, generator=torch.Generator().manual_seed(7))
    held = slice(None)
    if split:
        held = slice(tp_rank * len(stream.index) // tp, (tp_rank + 1) * len(stream.index) // tp)
    x, gradient, index = (stream.take(whole)[held], stream.take(upstream)[held], stream.index[held])
    x.requires_grad_()
    out = latent(x[:, None], packed_seq_params=stream.params)[0][:, 0]
    out.backward(gradient)
    results, real = {}, index >= 0
    for name, local in (("output", out.detach()), ("input", x.grad)):
        results[name] = torch.zeros_like(whole).index_copy_(0, index[real], local[real])
        for group in [mpu.get_context_parallel_group()] + [mpu.get_tensor_model_parallel_group()] * split:
            dist.all_reduce(results[name], group=group)
    for name, parameter in latent.named_parameters():
        grad = parameter.grad
        dist.all_reduce(grad, group=mpu.get_context_parallel_group())
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=mpu.get_tensor_model_parallel_group())
        elif "down" not in name and "norm" not in name:
            shards = [torch.empty_like(grad) for _ in range(tp)]
            dist.all_gather(shards, grad, group=mpu.get_tensor_model_parallel_group())
            grad = torch.cat(shards, 1 if name == "linear_proj.weight" else 0)
        results[name] = grad
    return results


@pytest.mark.procs
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="ranked"),
        pytest.param({"q_lora_rank": None, "v_head_dim": 24}, id="direct", marks=pytest.mark.campaign("families")),
    ],
)
def test_layouts_equal_one_process(changes):
    expected = layout_case({}, changes)
    for results in run_distributed(layout_cases, 4, 240, LAYOUTS, changes):
        for name, tensors in results.items():
            assert tensors.keys() == expected.keys()
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[key], atol=2e-4, rtol=1e-4, msg=f"{name}: {key}")
