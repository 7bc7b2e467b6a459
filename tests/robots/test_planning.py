"""What a robot's run holds beside its language model, against what torch and transformers hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.architectures.action_expert import ExpertShape
from megarl.architectures.vision import TowerShape, VisionShape
from megarl.checks.host import host_memory
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.dag.stage import Role
from megarl.robots.config import RobotConfig
from megarl.robots.planning import (
    call_columns,
    encoder_bytes,
    episode_bytes,
    expert_bytes,
    recorder_bytes,
    tower_bytes,
)

TOWERS = {
    "siglip": TowerShape(64, 3, 4, 256, 8, 64),
    "dino": TowerShape(64, 3, 4, 256, 8, 64, class_token=True, registers=4, layer_scale=True),
}


@pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)
def test_towers_keep_for_their_gradients_what_the_formula_says(tower: TowerShape) -> None:
    from megarl.robots.models.vla.vision import Tower

    kept: dict[int, int] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, pictures = Tower(tower, torch.float32), torch.randn(4, 3, 64, 64)
    owned = {one.untyped_storage().data_ptr() for one in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = model(pictures).sum()
    held = sum(size for place, size in kept.items() if place not in owned)
    formula = 4 * tower_bytes(VisionShape((tower,), 64), 4)
    assert 1 / 1.3 < held / formula < 1.3
    loss.backward()


def test_an_action_expert_keeps_for_its_gradients_what_the_formula_says() -> None:
    from megarl.robots.models.flow.expert import ActionExpert, PrefixKeys

    expert = ExpertShape(64, 256, 3, 3, layers=3, heads=4, groups=4, head=16, theta=100.0)
    robot = RobotConfig(family="pi0", dim=3, chunk=8, cameras=["top"])
    vision = VisionShape((TOWERS["siglip"],), 64, expert=expert)
    kept: dict[int, int] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, columns, calls, steps = ActionExpert(expert, torch.float32), call_columns(robot, vision), 4, robot.flow.steps
    prefix = columns - steps * 9
    keys = [tuple(torch.randn(calls, 4, prefix, 16, requires_grad=True) for _ in range(2)) for _ in range(3)]
    layers = [(k, v) for k, v in keys]
    owned = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *(k for layer in keys for k in layer)]}
    given = torch.randn(calls, 3), torch.randn(calls, steps, 8, 3), torch.rand(calls, steps)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = model(PrefixKeys(layers, torch.full((calls,), prefix)), *given).sum()
    held = sum(size for place, size in kept.items() if place not in owned)
    formula = calls * expert_bytes(robot, vision, 4)
    assert 1 / 1.5 < held / formula < 1.5
    loss.backward()


def test_columns_of_a_call_are_those_of_its_layout() -> None:
    from megarl.robots.models.vla.calls import CallLayout

    config = load_config("srpo_libero_openvla_oft_8gpu")
    vision = VisionShape(tuple(TOWERS.values())[:1], 64, state=8)
    assert config.robot is not None
    layout = CallLayout(32, vision.patches, config.robot.dim, config.robot.chunk, len(config.robot.cameras), True)
    assert call_columns(config.robot, vision) == layout.length


def test_the_encoder_of_videos_is_counted_by_its_config(tmp_path: Path) -> None:
    from transformers import VJEPA2Model

    from tests.robots.models.episodes.test_vjepa2 import SMALL

    folder = tmp_path / "vjepa2"
    model = VJEPA2Model(SMALL)
    model.save_pretrained(folder)
    layers = sum(one.numel() for one in model.encoder.layer.parameters())
    own = load_config("srpo_libero_openvla_oft_8gpu", [f"robot.reward.embedding.path={folder}"])
    held, _ = encoder_bytes(own, gpu=False)
    assert held == pytest.approx(4 * layers, rel=0.1)  # without biases and norms
    large, clips = encoder_bytes(load_config("srpo_libero_openvla_oft_8gpu"), gpu=True)
    assert large == pytest.approx(2 * 1.01e9, rel=0.01)
    assert clips > 1e9


def test_pictures_are_those_of_episodes_of_full_length() -> None:
    config = load_config("srpo_libero_openvla_oft_8gpu")
    vision = VisionShape((TowerShape(64, 3, 4, 256, 14, 224),), 64)
    longest, shortest = episode_bytes(config, vision)
    picture, frame = 224 * 224 * 3, 256 * 256 * 3
    assert longest == 65 * picture + 64 * frame
    assert shortest == 2 * picture
    assert recorder_bytes(config) == 4 * 64 * frame
    plain = load_config("srpo_libero_openvla_oft_8gpu", ["robot.reward.embedding.clip=calls"])
    assert episode_bytes(plain, vision)[0] == 65 * picture
    own = load_config("srpo_reach_quickstart")
    assert episode_bytes(own, vision)[0] == (32 // 4 + 1) * picture, "the simulator's own default limit"


def test_the_estimate_of_a_policy_of_7b_counts_all_of_it() -> None:
    from megarl.planning.memory import device_memory

    config = load_config("srpo_libero_openvla_oft_8gpu")
    checked = check_config(config)
    assert checked.placement is not None
    memory = device_memory(config, checked.sizes, checked.placement.teams[0], gpu=True)
    said = {part.what: part.bytes for part in memory.terms()}
    facts = checked.sizes[Role.ACTOR]
    assert facts is not None
    assert facts.vision is not None
    # Half of the language model, and all that it sees with, on each of two ranks.
    language = facts.parameters - facts.visual_parameters
    assert said["actor parameters"] == pytest.approx(2 * (language / 2 + facts.visual_parameters), rel=1e-3)
    assert said["vision towers at work"] > 5e9
    assert {"an encoder of videos", "clips in the encoder of videos"} < set(said)
    host = host_memory(config, checked.sizes, checked.placement, gpu=True)
    told = {part.what: part.bytes for part in host.terms()}
    assert told["pictures of 1024 episodes"] == 1024 * episode_bytes(config, facts.vision)[0]
    assert told["frames of 128 episodes at a time"] == 128 * recorder_bytes(config)


def test_only_policies_that_predict_token_after_token_have_a_cache() -> None:
    from megarl.artifacts.facts import model_facts
    from megarl.dag.placement import MODEL_ROLES, together

    config = load_config("srpo_reach_quickstart", ["robot.family=openvla", "robot.simulator.workers=10"])
    team, facts = together(config, MODEL_ROLES).teams[0], model_facts(config.model)
    assert facts.vision is not None
    assert config.robot is not None
    (cache,) = config.task.generation_terms(config, facts, team)
    columns = call_columns(config.robot, facts.vision)
    assert cache.bytes == 10 * columns * 3 * 2 * 64 * 4  # calls, columns, layers, keys and values, width, fp32
    few = load_config(
        "srpo_reach_quickstart", ["robot.family=openvla", f"actor.engine.micro_batch_tokens={2 * columns}"]
    )
    assert few.task.generation_terms(few, facts, team)[0].bytes == 2 * cache.bytes / 10
    whole = load_config("srpo_reach_quickstart")
    assert whole.task.generation_terms(whole, facts, team) == []
