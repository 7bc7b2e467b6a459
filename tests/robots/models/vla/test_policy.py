"""Robot policies on Megatron: equal to the published models' maths, one by one, packed and in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megarl.architectures.vision import KNOWN_TOWERS, VisionShape
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.robots.models.vla.config import policy_config, read_policy_config
from megarl.system.errors import ConfigError
from tests.dist import fresh_parallel, run_distributed, single_process, world
from tests.robots.models.vla.small import CONFIG, PROMPTS, SIGLIP, Oracle, layout, observed, prompt, save_small

pytestmark = pytest.mark.procs

STOP = 2
LAYOUTS = {"tp2": {"tp": 2}, "tp2+sp": {"tp": 2, "sp": True}}


def build(folder: Path, *, value_head: bool = False, **parallel: Any) -> Any:
    from megarl.models.build import build_policy
    from megarl.models.config import transformer_config
    from megarl.models.weights import load_weights

    hf = read_policy_config(folder)
    config = transformer_config(hf, ParallelConfig(**parallel), dtype=torch.float32, engine=EngineConfig())
    chunks = build_policy(hf, config, value_head=value_head)
    load_weights(chunks, folder)
    return chunks


def stream_of(numbers: list[int], *, open_from: str = "all", multiple: int = 1) -> tuple[Tensor, Any, list[Any]]:
    """Input, packed stream and layouts of these calls."""
    from megarl.models.packing import pack_stream
    from megarl.robots.models.vla.vision import Seen

    pixels, states = observed(len(PROMPTS))
    layouts = [layout(PROMPTS[n], parallel=open_from != "none") for n in numbers]
    lengths = [one.length for one in layouts]
    opens = {"all": [0] * len(numbers), "block": [one.slots.start for one in layouts], "none": []}[open_from]
    stream = pack_stream(lengths, multiple=multiple, open_from=opens)
    tokens, places, state_places, blank, start = [], [], [], [], 0
    for number, one in zip(numbers, layouts, strict=True):
        ids = torch.zeros(one.length, dtype=torch.int64)
        ids[0], ids[one.text] = prompt(number)[0], prompt(number)[1:]
        if one.stop is not None:
            ids[one.stop] = STOP
        tokens.append(ids)
        columns = torch.arange(one.length) + start
        places.append(columns[one.visual])
        state_places.append(columns[one.state_at])
        blank.append(columns[one.slots])
        start += one.length
    stream.params.seen = Seen(
        pixels[numbers].flatten(0, 1), torch.cat(places), states[numbers], torch.stack(state_places), torch.cat(blank)
    )
    return stream.input_ids(torch.cat(tokens)), stream, layouts


def hidden_of(model: Any, numbers: list[int], open_from: str = "all") -> list[Tensor]:
    ids, stream, layouts = stream_of(numbers, open_from=open_from)
    hidden = model(ids, stream.position_ids, None, packed_seq_params=stream.params)[:, 0]
    return list(hidden.split([one.length for one in layouts]))


def oracle_of(tensors: dict[str, Tensor], number: int, open_from: str) -> Tensor:
    pixels, states = observed(len(PROMPTS))
    one, oracle = layout(PROMPTS[number], parallel=open_from != "none"), Oracle(tensors)
    rows = oracle.embeddings(
        prompt(number), pixels[number], states[number], one.actions, STOP if one.parallel else None
    )
    place = torch.arange(len(rows))
    seen = place[None] <= place[:, None]
    if open_from != "none":
        seen |= place[:, None] >= (0 if open_from == "all" else one.slots.start)
    return oracle.hidden(rows, seen)


@pytest.mark.parametrize("open_from", ["all", "block", "none"])
def test_hidden_states_equal_the_published_maths(open_from, tmp_path):
    single_process()
    tensors = save_small(tmp_path)
    (model,) = build(tmp_path)
    with torch.no_grad():
        for number, found in enumerate(hidden_of(model, [0, 1, 2], open_from)):
            # fp32 over eight layers of sums against float64: a few units of 1e-7 of values of about 3
            torch.testing.assert_close(found.double(), oracle_of(tensors, number, open_from), atol=2e-5, rtol=0)


@pytest.mark.parametrize("open_from", ["all", "none"])
def test_a_critics_value_of_a_call_is_read_before_its_first_action(open_from, tmp_path):
    """It does not depend on the call's actions, whose tokens are the input of slots predicted one after another."""
    from megarl.training.heads import Values

    single_process()
    tensors = save_small(tmp_path)
    (critic,) = build(tmp_path, value_head=True)
    assert not critic.value_weight.any(), "a policy's weights have no value head"
    ids, stream, (one,) = stream_of([1], open_from=open_from)
    row = one.predictors.start
    with torch.no_grad():
        critic.value_weight.copy_(torch.linspace(-1, 1, critic.value_weight.numel())[None])
        hidden = critic(ids, stream.position_ids, None, packed_seq_params=stream.params)[:, 0]
        (value,) = Values()(hidden, critic, SimpleNamespace(rows=torch.tensor([row])))
        expected = oracle_of(tensors, 1, open_from)[row] @ critic.value_weight[0].double()
        torch.testing.assert_close(value[0].double(), expected, atol=1e-4, rtol=0)  # fp32 sums of 32 terms of about 3
    assert row == one.text.stop - 1, "the prompt's last token"


def test_packing_changes_no_gradient(tmp_path):
    single_process()
    save_small(tmp_path)
    (packed,), (alone,) = build(tmp_path), build(tmp_path)
    sum(weighted(found) for found in hidden_of(packed, [0, 1, 2])).backward()
    for number in range(3):
        weighted(hidden_of(alone, [number])[0]).backward()
    for (name, one), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if one.grad is None:
            assert "output_layer" in name
            continue
        torch.testing.assert_close(one.grad, other.grad, atol=2e-4, rtol=1e-4, msg=lambda text, name=name: name + text)


def weighted(hidden: Tensor) -> Tensor:
    return (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum()


def test_a_slot_sees_later_ones_and_a_prompt_only_where_all_do(tmp_path):
    single_process()
    save_small(tmp_path)
    (model,) = build(tmp_path)
    (one,) = stream_of([0])[2]
    with torch.no_grad():
        for open_from in ("all", "block"):
            ids, stream, _ = stream_of([0], open_from=open_from)
            before = model(ids, stream.position_ids, None, packed_seq_params=stream.params)[:, 0]
            ids[0, one.stop] = 9  # the last column
            stream.params.cache.clear()
            changed = (
                model(ids, stream.position_ids, None, packed_seq_params=stream.params)[:, 0] - before
            ).abs() > 1e-6
            assert changed[one.slots].any(1).all()
            assert changed[: one.text.stop].any() == (open_from == "all")


def test_a_checkpoint_goes_in_and_out_unchanged(tmp_path):
    from megarl.models.weights import export_weights

    single_process()
    (tmp_path / "in").mkdir()
    tensors = save_small(tmp_path / "in")
    chunks = build(tmp_path / "in")
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, world=world())
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG | {"torch_dtype": "float32"}


# -- layouts ----------------------------------------------------------------------------------------------------------


def in_layouts(folder: str, layouts: dict[str, dict]) -> dict[str, Any]:
    """Of each layout: hidden states of the calls' columns, and gradients of what is whole on every rank."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    results: dict[str, Any] = {}
    for name, parallel in layouts.items():
        fresh_parallel(**{key: value for key, value in parallel.items() if key != "sp"})
        (model,) = build(Path(folder), **parallel)
        ids, stream, given = stream_of([0, 1, 2], multiple=parallel.get("tp", 1))
        hidden = model(ids, stream.position_ids, None, packed_seq_params=stream.params)
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden[: sum(one.length for one in given), 0]
        weighted(hidden).backward()
        gradients = {n: p.grad for n, p in model.vision.named_parameters()}
        if model.config.sequence_parallel:  # each rank has that of its own columns
            for gradient in gradients.values():
                dist.all_reduce(gradient)
        results[name] = {"hidden": hidden.detach(), **gradients}
    return results


def test_tensor_and_sequence_parallel_equal_one_process(tmp_path):
    single_process()
    save_small(tmp_path)
    expected = in_layouts(str(tmp_path), {"one": {}})["one"]
    for ranks in run_distributed(in_layouts, 2, 240.0, str(tmp_path), LAYOUTS):
        for found in ranks.values():
            for name, value in expected.items():
                # Sums in another order: a few units in the last place of the largest terms.
                assert (found[name] - value).abs().max() < 1e-5 * value.abs().max(), name


# -- configurations ---------------------------------------------------------------------------------------------------


def test_the_published_policy_has_the_published_sizes():
    """Counted from the configurations of the two towers, by hand."""
    names = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    shape = VisionShape.from_config({"timm_model_ids": names}, 4096, "config.json")
    assert shape.patches == 256
    tensors = dict(shape.tensors.values())
    assert tensors["projector.fc1.weight"] == (8704, 2176)
    assert tensors["projector.fc3.weight"] == (4096, 4096)
    assert tensors["vision_backbone.featurizer.blocks.22.ls2.scale_factor"] == (1024,)
    assert tensors["vision_backbone.fused_featurizer.blocks.25.mlp.fc1.weight"] == (4304, 1152)
    assert "vision_backbone.fused_featurizer.cls_token" not in tensors
    assert set(KNOWN_TOWERS) == set(names)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llava"}, "not the configuration of a robot policy"),
        ({"vision_towers": None, "timm_model_ids": ["resnet50"]}, "timm_model_ids"),
        ({"vision_towers": [SIGLIP | {"depth": 3}]}, "vision_towers[0]"),
        ({"vision_towers": [SIGLIP | {"heads": 3}]}, "do not fit together"),
        ({"vision_towers": [SIGLIP, SIGLIP | {"patch": 2}]}, "do not fit together"),
        ({"vision_towers": [SIGLIP] * 3}, "one or two towers"),
    ],
)
def test_what_is_no_policy_is_refused(changes, text):
    with pytest.raises(ConfigError) as caught:
        policy_config(CONFIG | changes, "small/config.json")
    assert text in str(caught.value)
    assert "small/config.json" in str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no config"):
        read_policy_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_policy_config(tmp_path).hidden_size == CONFIG["text_config"]["hidden_size"]
