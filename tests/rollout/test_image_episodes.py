"""Episodes whose environments show images, against transformers.

Tolerance: float32 of values of size 1 to 10, whose sums run in another order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.data.image_prompts import ImagePrompts
from megarl.data.image_set import image_sets, pil_images
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.disaggregated.as_ready_checkpoint import flow_files, read_buffered_groups
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.models.hf import encoder_of, image_settings, load_hf_config
from megarl.rollout.answers import EpisodeLimits, EpisodeRules
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.groups import EpisodeError, Group, GroupGenerator
from megarl.system.metrics import Metrics
from tests.dist import layout_for, single_process
from tests.models.tiny import build_tiny
from tests.models.vlm_tiny import (
    BEGIN,
    END,
    IMAGE,
    KINDS,
    VOCABULARY,
    batch_of,
    draw,
    in_training,
    of_transformers,
    save,
)

#: Turns end at a third of all tokens, so after a few.
STOPS = [token for token in range(0, VOCABULARY, 3) if token not in (BEGIN, IMAGE, END)]
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=24, stop_token_ids=STOPS)

ONE_KIND = pytest.mark.parametrize("made", KINDS[:1], indirect=True)


class Letters:
    """A tokenizer whose token 65 is the letter A."""

    unk_token_id = bos_token_id = eos_token_id = None

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def texts(rows: list[list[int]]) -> tuple[list[str], list[str]]:
    found = ["".join(map(chr, row)) for row in rows]
    return found, found


class Looking(Environment):
    """Shows the upper half of the last image, and what it was given; ends after three turns."""

    replayable = True

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.images = list(row["images"])
        return row.get("first")

    def step(self, action: Action) -> Step:
        last = self.images[-1]
        view = last.crop((0, 0, last.width, max(28, last.height // 2)))
        self.images.append(view)
        seen = [{"type": "image", "image": view}, {"type": "text", "text": f"\x96now {action.turn}?"}]
        return Step(seen if action.turn else [*seen, {"type": "image", "image": last}], 1.0, done=action.turn == 2)


class Broken(Looking):
    """Shows a file that is not there in its second turn."""

    def step(self, action: Action) -> Step:
        return Step([{"type": "image", "image": "nowhere.png"}]) if action.turn else super().step(action)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """A model of each kind: engine, its module, transformers' model, image settings, prompts with images."""
    single_process()
    folder = tmp_path_factory.mktemp(request.param)
    reference = save(folder, request.param)
    hf = load_hf_config(ModelConfig(path=str(folder), vision=True))
    rng, encoder = random.Random(1), encoder_of(hf)
    settings = image_settings(hf).limited(28 * 28, 28 * 28 * 64)
    samples = [draw(rng, encoder, *shapes) for shapes in (((4, 2),), ((2, 1), (2, 3)))]
    chunks = build_tiny(folder, vision=True)
    engine = EmbeddedEngine(chunks, RolloutConfig(max_running=3), layout_for(ParallelConfig()))
    return SimpleNamespace(engine=engine, reference=reference, settings=settings, prompts=samples)


def rules_of(host: Host, reader: ImagePrompts, on_error: str, **limits: Any) -> EpisodeRules:
    known = {"turns": 8, "prompt_tokens": 60, "tokens": 120, "seconds": None, "image_token": IMAGE, **limits}
    turns, same = Turns(Letters(), None, STOPS), lambda told: told
    return EpisodeRules(host, turns, texts, same, EpisodeLimits(**known), on_error, True, reader)


@contextmanager
def producer(
    made, kind: type[Environment], on_error: str = "fail", **limits: Any
) -> Iterator[tuple[GroupGenerator, Group]]:
    """Groups of episodes, and the first sample of the first prompt."""
    text = "".join(map(chr, (BEGIN, IMAGE, END)))
    reader = ImagePrompts("images", "prompt", None, None, made.settings, IMAGE, chr(IMAGE), text)
    host = Host(kind, kind.Settings(), None, reader)
    rules = rules_of(host, reader, on_error, **limits)
    with closing(host), closing(GroupGenerator(made.engine, SAMPLING, [0], 4, 200, rules)) as groups:
        yield groups, asked(made, 0, 1)


def asked(made, number: int, samples: int) -> Group:
    """Segment k of sample i of prompt p has the seed 1000 p + 100 i + k."""
    prompt, images = made.prompts[number].prompt, image_sets(batch_of(made.prompts, made.settings))[number]
    seeds = [partial(int.__add__, 1000 * number + 100 * place) for place in range(samples)]
    return Group(number, prompt, seeds, f"p{number}", {"images": pil_images(images)}, images=images)


def play(made, kind: type[Environment], on_error: str = "fail", **limits: Any) -> list[Trajectory]:
    """Two samples each of two prompts."""
    with producer(made, kind, on_error, **limits) as (groups, _):
        for number in range(len(made.prompts)):
            groups.add(asked(made, number, 2))
        return [trajectory for group in groups.finish() for trajectory in group]


def test_logprobs_of_later_turns_equal_transformers_in_generation_and_training(made):
    reference, settings, samples = made.reference, made.settings, made.prompts
    found = play(made, Looking)
    assert max(one.turns for one in found) == 3
    for one, sample in zip(found, [samples[0], samples[0], samples[1], samples[1]], strict=True):
        shown = sum(place[0] >= len(one.prompt_ids) for place in one.images.places)
        assert shown == (0, 2, 3)[one.turns - 1], "two images after the first turn, one after the second"
        assert one.images.places[0][0] == sample.starts[0]
        assert all(
            (one.prompt_ids + one.token_ids)[start + rows * columns] == END
            for start, rows, columns, _ in one.images.places
        )
    with torch.no_grad():
        want = torch.cat([of_transformers(reference, one, settings) for one in found])
    drawn = torch.tensor([drawn for one in found for drawn in one.sampled])
    generated = torch.tensor([logp for one in found for logp in one.logprobs])
    torch.testing.assert_close(generated[drawn], want[drawn], atol=1e-5, rtol=0)
    assert drawn.sum() < len(drawn)

    trained, patches = in_training(made.engine.chunks[0], found, settings)
    torch.testing.assert_close(trained, want, atol=1e-5, rtol=0)
    digests = {digest: size for one in found for digest, size in zip(one.images.digests, one.images.sizes, strict=True)}
    assert patches == sum(digests.values()), "each image once"


@ONE_KIND
def test_one_image_after_different_texts_is_read_in_its_own_place(made):
    with producer(made, Looking, turns=1) as (groups, first):
        for shift in (0, 3):
            prompt = [*made.prompts[0].prompt[:1]] * shift + [*made.prompts[0].prompt]
            groups.add(replace(first, number=shift, prompt_ids=prompt, images=first.images.shifted(shift)))
        found = [trajectory for group in groups.finish() for trajectory in group]
    assert [one.images.places[0][0] for one in found] == [made.prompts[0].starts[0] + shift for shift in (0, 3)]
    with torch.no_grad():
        want = torch.cat([of_transformers(made.reference, one, made.settings) for one in found])
    torch.testing.assert_close(torch.tensor([logp for one in found for logp in one.logprobs]), want, atol=1e-5, rtol=0)


@ONE_KIND
def test_a_broken_image_is_an_error_of_its_episode(made):
    with pytest.raises(
        EpisodeError,
        match=r"sample p\d#\d failed at turn 1: step \(turn 1\): the environment returned an observation that cannot "
        r"be read: image 1 of the[\s\S]*nowhere",
    ):
        play(made, Broken)
    marked = play(made, Broken, "mark")
    assert {one.ended_by for one in marked} >= {"error"}
    for one in marked:
        assert one.ended_by != "error" or (not any(one.sampled) and "image 1 of the observation" in one.error)


@ONE_KIND
def test_an_episode_ends_where_its_environment_shows_one_image_too_many(made):
    whole, limited = play(made, Looking), play(made, Looking, images=3)
    assert "images" in {one.ended_by for one in limited}
    for one, other in zip(limited, whole, strict=True):
        assert len(one.images.places) <= 3
        assert (one.ended_by == "images") == (len(other.images.places) > 3)
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert one.turn_rewards == other.turn_rewards[: one.turns]


class Many(Looking):
    """Begins with more images than an episode may have."""

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        return [{"type": "image", "image": row["images"][0]}] * 2


@ONE_KIND
def test_a_first_observation_of_too_many_images_is_an_error(made):
    marked = play(made, Many, "mark", images=1)
    assert {one.error for one in marked} == {"reset returned 2 images; data.limit_images is 1"}


@ONE_KIND
def test_a_turn_with_the_token_of_an_image_is_the_last(made):
    """A server would look for another image. Another token plays the part, one that the model samples."""
    token = next(one.turn(0)[0] for one in play(made, Looking) if one.turns > 1)
    ended = [one for one in play(made, Looking, image_token=token) if token in one.token_ids]
    assert "image_token" in {one.ended_by for one in ended}
    assert all(token in one.last_turn and one.turn_rewards[-1] == 1.0 for one in ended)


@ONE_KIND
def test_an_interrupted_episode_goes_on_from_a_checkpoint_with_its_images(made, tmp_path):
    """Its environment shows them again; where these are others, the episode begins again."""
    [whole, *_] = play(made, Looking)
    assert whole.turns == 3
    kept = whole.copy()
    kept.ended_by, end = "", kept.turn_starts[2]  # before its last turn
    for values in (kept.token_ids, kept.sampled, kept.logprobs):
        del values[end:]
    del kept.turn_starts[2:], kept.turn_ends[2:], kept.turn_rewards[2:]
    kept.versions, kept.segments, kept.info = [[0, end]], 2, {}
    for name, content in flow_files(
        SimpleNamespace(dp_rank=0, is_lead=True), [], {}, {0: [kept]}, [], Metrics()
    ).items():
        (tmp_path / name).write_bytes(content)
    [read] = read_buffered_groups(tmp_path, 1).partials[0]
    assert torch.equal(read.images.patches, kept.images.patches)
    with producer(made, Looking) as (groups, first):
        groups.add(first, [read])
        groups.open()
        [(_, [again])] = groups.wait()
    assert (again.token_ids, again.images.places, again.ended_by) == (whole.token_ids, whole.images.places, "done")
    assert torch.equal(again.images.patches, whole.images.patches)
    torch.testing.assert_close(again.logprobs, whole.logprobs, atol=1e-5, rtol=0)
    read.images = replace(read.images, digests=(*read.images.digests[:-1], 5))
    with producer(made, Looking) as (groups, first):
        groups.add(first, [read])
        groups.open()
        [(_, [fresh])] = groups.wait()
    assert (fresh.token_ids, fresh.images.digests) == (whole.token_ids, whole.images.digests)
