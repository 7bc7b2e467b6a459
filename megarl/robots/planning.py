"""The memory of a robot's run in addition to its language model: vision towers, a video encoder, images of episodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megarl.architectures.vision import VisionShape
from megarl.artifacts.facts import local_folder
from megarl.config.components import settings_at
from megarl.config.run import RunConfig
from megarl.robots.config import EmbeddingSettings, RobotConfig, robot_of
from megarl.robots.models.vla.calls import FLOW
from megarl.robots.simulators.registry import BATCHED, SIMULATORS, simulator_class
from megarl.system.errors import ConfigError

#: Values for what the recipe does not set, as in LIBERO: tokens of an instruction, environment steps, and pixels of a
#: picture's side.
PROMPT, _STEPS, _SIDE = 32, 512, 256
_HELD_CLIPS = 4  # estimated frames in the memory of a simulator's process, as a multiple of a clip's frames


@dataclass(frozen=True)
class _Encoder:
    """The sizes of V-JEPA 2. The defaults are those of the largest published model, at 384 pixels."""

    width: int = 1408
    layers: int = 40
    mlp: int = 6144
    frames: int = 64
    tokens: int = 32 * 24 * 24

    @property
    def parameters(self) -> int:
        return self.layers * (4 * self.width**2 + 2 * self.width * self.mlp)


def call_columns(robot: RobotConfig, vision: VisionShape) -> int:
    """Return the sequence length of a policy call in the language model, for an instruction of `PROMPT` tokens."""
    return PROMPT + vision.patches * len(robot.cameras) + bool(vision.state) + action_columns(robot)


def action_columns(robot: RobotConfig) -> int:
    """Return how many columns (positions) the actions of a policy call take: K * D action tokens, and a stop token if
    one pass predicts all of them.

    The tokens of an action expert are not in the language model's sequence. They count here all the same (the state and
    K actions in each denoising step), because micro-batches are filled by this number.
    """
    if robot.family == FLOW:
        return robot.flow.steps * (1 + robot.chunk)
    return robot.chunk * robot.dim + (robot.family != "openvla")


def response_numbers(robot: RobotConfig) -> int:
    """Return the number of response tokens of a policy call: its action tokens, or the numbers that all steps of its
    denoising chain produce."""
    return robot.chunk * robot.dim * (robot.flow.steps if robot.family == FLOW else 1)


def expert_bytes(robot: RobotConfig, vision: VisionShape, element: int) -> float:
    """Return the bytes of the activations that an action expert keeps for the backward pass of one policy call; 0 for a
    policy without one.

    Per layer and token, these are the inputs of both norms (in float32, with the normalised values) and of the linear
    layers, the MLP's three hidden vectors, queries, keys and values. Per layer and call, they are also the copies of
    the language model's keys and values, which are joined with the expert's. `element`: bytes of a number.
    """
    expert = vision.expert
    if expert is None:
        return 0.0
    tokens, heads = action_columns(robot), expert.heads * expert.head
    each = 12 * expert.width + 3 * expert.mlp + 6 * heads
    prefix = call_columns(robot, vision)
    return expert.layers * (tokens * each + 4 * prefix * heads) * element


def tower_bytes(vision: VisionShape, element: int) -> float:
    """Return the bytes of the vision towers' activations for one image, which are kept for the backward pass.

    Per block: inputs of both norms and of the four linear layers, queries, keys and values, the input of the layer
    scale, and the MLP's hidden layer before and after its activation. `element`: bytes of a number.
    """
    total = 0.0
    for tower in vision.towers:
        tokens = tower.patches + tower.class_token + tower.registers
        total += tower.blocks * tokens * ((9 + 2 * tower.layer_scale) * tower.width + 2 * tower.mlp)
    return total * element


def encoder_bytes(config: RunConfig, *, gpu: bool) -> tuple[float, float]:
    """Return the bytes of a video encoder's parameters, and of the clips that pass through it; zeros without an
    encoder.
    """
    wanted = _embedding(config)
    if wanted is None or wanted.name != "vjepa2":
        return 0.0, 0.0
    encoder, element = _encoder(wanted.path), 2 if gpu else 4
    # The estimate counts per token 6 vectors of the encoder's width, among them residual, queries, keys and values, and
    # 2 of the width of the MLP's hidden layer.
    token = (6 * encoder.width + 2 * encoder.mlp) * element
    return encoder.parameters * element, wanted.batch_size * encoder.tokens * token


def episode_bytes(config: RunConfig, vision: VisionShape) -> tuple[float, float]:
    """Return the picture bytes of the longest episode, including its clip, and of an episode with one policy call."""
    robot = robot_of(config)
    picture = len(robot.cameras) * vision.towers[0].image ** 2 * 3
    calls = -(-_own_setting(robot, "max_steps", _STEPS) // robot.chunk)
    return (calls + 1) * picture + _clip_bytes(config), 2.0 * picture


def recorder_bytes(config: RunConfig) -> float:
    """Return the maximum bytes of frames that one simulator's process keeps for a clip."""
    return _HELD_CLIPS * _clip_bytes(config)


def _clip_bytes(config: RunConfig) -> float:
    """Return the bytes of an episode's clip as the simulator renders it."""
    wanted, robot = _embedding(config), config.robot
    if wanted is None or robot is None or not wanted.by_steps:
        return 0.0
    return len(robot.cameras) * _encoder(wanted.path).frames * 3.0 * _own_setting(robot, "size", _SIDE) ** 2


def _embedding(config: RunConfig) -> EmbeddingSettings | None:
    robot = config.robot
    if robot is None or robot.reward.name != "progress":
        return None
    try:
        return settings_at("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings)
    except ConfigError:
        return None  # the check of `robot.reward.embedding` reports the error


def _encoder(path: str | None) -> _Encoder:
    """Return the encoder's sizes from its folder on this machine; without one, those of the largest published model."""
    folder = None if path is None else local_folder(path)
    try:
        raw: dict[str, Any] = {} if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width, side = int(raw["hidden_size"]), int(raw["crop_size"]) // int(raw["patch_size"])
        frames = int(raw["frames_per_clip"])
        return _Encoder(
            width,
            int(raw["num_hidden_layers"]),
            int(width * float(raw.get("mlp_ratio", 4))),
            frames,
            frames // int(raw.get("tubelet_size", 2)) * side**2,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return _Encoder()


def _own_setting(robot: RobotConfig, key: str, default: int) -> int:
    """Return a number from the simulator's own keys, or its default there, or else `default`."""
    value, name = robot.simulator.get(key), robot.simulator.get("name")
    if value is None and name in SIMULATORS | BATCHED:
        value = simulator_class(str(name), batched=name not in SIMULATORS).settings.get(key)
    return value if isinstance(value, int) else default
