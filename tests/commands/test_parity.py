"""Where two implementations of a model part ways: nowhere with the same weights, else at the changed place."""

import contextlib
import math
import types

import pytest
import torch

from megarl import cli
from megarl.commands import parity as parity_command
from megarl.commands.parity import compare
from tests.dist import no_parallel, single_process
from tests.models.tiny import build_tiny, save_tiny
from tests.rollout.forked import forked_servers
from tests.rollout.servers import need_interpreter

SEQUENCES = [torch.arange(3, 20), torch.arange(40, 47)]


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3_moe"])
def test_equal_models_differ_nowhere(name, tmp_path):
    reference = save_tiny(tmp_path, name)
    (policy,) = build_tiny(tmp_path)
    found = compare(reference, policy, SEQUENCES)
    assert found.first is None
    assert found.verdict.startswith("they agree: no relative difference above rounding (")
    assert [place.name for place in found.places[:4]] == ["embedding", "layer 0 attention", "layer 0 mlp", "layer 0"]
    assert max(place.relative for place in (*found.places, *found.logprobs)) < 1e-5  # measured: about 1e-6


def test_first_place_is_the_changed_one(tmp_path):
    reference = save_tiny(tmp_path, "qwen3")
    (policy,) = build_tiny(tmp_path)
    with torch.no_grad():
        policy.decoder.layers[2].mlp.linear_fc2.weight[0, 0] += 0.5
    found = compare(reference, policy, SEQUENCES)
    assert found.first.name == "layer 2 mlp"
    assert found.verdict.endswith("first at: layer 2 mlp")
    assert found.first.relative > found.tolerance


def test_not_a_number_counts_as_a_difference(tmp_path):
    reference = save_tiny(tmp_path, "qwen3")
    (policy,) = build_tiny(tmp_path)
    with torch.no_grad():
        policy.decoder.layers[1].self_attention.linear_proj.weight[0, 0] = math.nan
    assert compare(reference, policy, SEQUENCES).first.name == "layer 1 attention"


@pytest.fixture
def halves(tmp_path):
    """A mixture in bf16, of transformers and of ours."""
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path, "qwen3_moe", num_experts=8)
    (policy,) = build_tiny(tmp_path, torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    return reference.eval(), policy


def random_tokens():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(131, (n,), generator=g) for n in parity_command.LENGTHS]


def test_a_mixture_in_bf16_agrees_although_tokens_go_to_other_experts(halves, monkeypatch):
    found = compare(*halves, random_tokens())
    assert found.first is None
    assert found.verdict.endswith("without the 10% of tokens that differ most")
    monkeypatch.setattr(parity_command, "REROUTED", 0.0)
    plain = compare(*halves, random_tokens())
    worst, without = (max(place.relative for place in one.places) for one in (plain, found))
    assert worst > 3 * without


def one_expert(layer):
    layer.mlp.experts.linear_fc2.weight.view(8, -1)[5] *= -1


def experts_swapped(layer):
    layer.mlp.router.weight.copy_(layer.mlp.router.weight.roll(1, 0))


def equal_shares(layer):
    layer.mlp.router.weight.mul_(0.01)


def not_a_number(layer):
    layer.mlp.experts.linear_fc2.weight.view(8, -1)[5, 0] = math.nan


@pytest.mark.parametrize("plant", [one_expert, experts_swapped, equal_shares, not_a_number])
def test_a_defect_of_a_mixture_is_found_in_bf16(halves, plant):
    reference, policy = halves
    with torch.no_grad():
        plant(policy.decoder.layers[2])
    found = compare(reference, policy, random_tokens())
    assert found.first.name == "layer 2 mlp"


def test_other_logprobs_are_compared_last(tmp_path):
    reference = save_tiny(tmp_path, "qwen3")
    (policy,) = build_tiny(tmp_path)
    wrong = [torch.zeros(len(ids) - 1) for ids in SEQUENCES]
    assert compare(reference, policy, SEQUENCES, {"server": wrong}).first.name == "log-probs, server"


def test_the_server_has_ended_before_the_models_are_loaded(tmp_path, monkeypatch):
    order = []

    @contextlib.contextmanager
    def fleet(*args, **settings):
        order.append("server")
        yield types.SimpleNamespace(servers=[types.SimpleNamespace(api=Api())])
        order.append("server has ended")

    def load(*args):
        order.append("models")
        raise KeyboardInterrupt

    save_tiny(tmp_path, "qwen3")
    monkeypatch.setattr(parity_command, "find_python", lambda *args, **kind: tmp_path)
    monkeypatch.setattr("megarl.rollout.sglang.launch.open_fleet", fleet)
    monkeypatch.setattr(parity_command, "_load_both", load)
    no_parallel()  # the command makes its own layout
    with pytest.raises(KeyboardInterrupt):
        parity_command.parity(tmp_path)
    assert order == ["server", "server has ended", "models"]


def test_a_run_folder_is_answered_with_its_model(tmp_path, capsys):
    assert cli.main(["doctor", "parity", str(tmp_path / "nosuch")]) == 2
    assert "megarl doctor parity: the folder does not exist" in capsys.readouterr().err
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert cli.main(["doctor", "parity", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "this folder has neither a model nor a checkpoint" in said
    assert f"did you mean {tmp_path / 'hf'}?" in said


class Api:
    """Every token has log-prob -1."""

    def call(self, path, payload, **settings):
        rows = [[None, None, None]] + [[-1.0, token, None] for token in payload["input_ids"][1:]]
        return {"meta_info": {"input_token_logprobs": rows}}


@pytest.mark.procs
@pytest.mark.servers
@pytest.mark.timeout(600)
def test_command_compares_a_server_too(tmp_path, capsys):
    need_interpreter()
    save_tiny(tmp_path, "qwen3")
    no_parallel()  # the command makes its own layout
    with forked_servers():
        assert cli.main(["doctor", "parity", str(tmp_path)]) == 0
    assert "log-probs, server" in capsys.readouterr().out
