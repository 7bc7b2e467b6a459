"""A real SGLang server of a vision-language model: what it generates from images, before and after new weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.config.sync import SyncConfig
from megarl.data.image_set import ImageSet, image_sets
from megarl.data.routes import RouteForm
from megarl.models.hf import encoder_of, image_settings, load_hf_config, route_form
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sglang.engine import SglangEngine
from megarl.rollout.sglang.fleet import Fleet
from megarl.rollout.sglang.images import keeping_sizes, write_processor
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.receiver import SglangReceivers
from megarl.rollout.sglang.routes import SWITCH
from megarl.sync.updater import WeightSync
from megarl.system.comm import WorkerGroup
from megarl.system.compat.cuda import version_in
from tests.dist import layout_for, single_process
from tests.models.tiny import build_tiny
from tests.models.vlm_tiny import IMAGE, batch_of, draw, save
from tests.rollout.forked import forked_servers
from tests.rollout.servers import engine, need_interpreter, start

pytestmark = [pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(600)]
SAMPLING = SamplingConfig(temperature=0.0, max_new_tokens=6, ignore_eos=True)
SHAPES = [((2, 3),), (), ((1, 1), (4, 2)), ((3, 3),)]


def requests(folder: Path) -> list[Request]:
    """Two samples each of prompts with one image, none, two, one."""
    hf = load_hf_config(ModelConfig(path=str(folder)))
    rng, encoder, settings = random.Random(1), encoder_of(hf), image_settings(hf)
    assert encoder is not None
    samples = [draw(rng, encoder, *shapes) for shapes in SHAPES]
    sets = image_sets(batch_of(samples, settings))
    return [Request(one.prompt, [1, 2], images=images) for one, images in zip(samples, sets, strict=True)]


def assert_equal(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    """The same greedy tokens and log-probs."""
    for theirs, ours in zip(found, expected, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert one.token_ids == other.token_ids
            # float32 on both sides, other kernels in encoder and decoder
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)


def two_turns(made: EmbeddedEngine | SglangEngine, asked: list[Request]) -> list[list[Completion]]:
    """Two turns of each request; the environment shows the images of the next one in between."""
    generation, told = made.open(SAMPLING, [], len(asked), 200), list[list[Completion]]()
    tokens, images = [list(one.prompt_ids) for one in asked], [one.images for one in asked]
    for turn in range(2):
        for number in range(len(asked)):
            generation.submit(number, list(tokens[number]), turn, 6, images[number])
        done: dict[int, Completion] = {}
        while len(done) < len(asked):
            assert generation.any_busy(True)
            done |= generation.wait()
        told.append([done[number] for number in range(len(asked))])
        for number, own in enumerate(tokens):
            following = asked[(number + 1) % len(asked)]
            # What the model says may be the token of an image, with which an episode would end.
            own += [token if token != IMAGE else 7 for token in done[number].token_ids]
            if following.images is not None:
                shown, known = following.images.shifted(len(own)), images[number]
                images[number] = shown if known is None else ImageSet.joined([known, shown], [0, 0])
            own += following.prompt_ids
    generation.close()
    return told


def chosen(groups: list[list[Completion]], form: RouteForm) -> list[list[list[list[int]]]]:
    """The experts of each token and layer of all samples, whose order among themselves is arbitrary."""
    return [
        done.routes.unflatten(1, (form.layers, form.chosen)).long().sort(-1).values.tolist()
        for group in groups
        for done in group
        if done.routes is not None
    ]


def push(fleet: Fleet, sync: WeightSync, version: int) -> None:
    report = sync.push(version)
    assert (report.failed, report.updated) == ({}, [0])
    assert report.verified


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("qwen2_5_vl", 1),
        pytest.param("qwen2_5_vl", 2, marks=pytest.mark.campaign("servers")),
        *(
            pytest.param(kind, tp, marks=pytest.mark.campaign("servers"))
            for kind in ("qwen2_vl", "qwen3_vl")
            for tp in (1, 2)
        ),
        pytest.param("qwen3_vl_moe", 1, marks=pytest.mark.campaign("servers")),
    ],
)
def test_it_generates_as_the_embedded_engine_with_every_version_of_the_encoder(
    kind: str, tp: int, tmp_path: Path
) -> None:
    if version_in(need_interpreter(), "torchvision") is None:
        pytest.skip("the servers' interpreter has no torchvision: run `make sglang-env`")
    single_process()
    folder = tmp_path / "model"
    # On a CPU the server pads widths to multiples of 32 on each rank; for the rest see docs/images.md.
    mixture: dict[str, Any] = {"moe_intermediate_size": 64, "mlp_only_layers": [], "deepstack": [0, 1, 2]}
    save(folder, kind, intermediate_size=128, **(mixture if kind == "qwen3_vl_moe" else {}))
    asked, chunks = requests(folder), build_tiny(folder)
    hf = chunks[0].hf_config
    write_metadata(folder, hf, None, torch.float32)  # as in a run
    write_processor(folder, hf)
    form, rollout = route_form(hf), RolloutConfig(max_running=3, replay_routes=route_form(hf) is not None)
    embedded = EmbeddedEngine(chunks, rollout, layout_for(ParallelConfig()))

    def expected() -> list[list[Completion]]:
        return embedded.generate(asked, SAMPLING, [])

    settings: dict[str, Any] = {"timeout_s": 60.0, "verify": "every", "transport": "tensor"}
    random_weights = SGLangConfig(extra_args=["--load-format", "dummy"])  # as in a run
    arguments = [*keeping_sizes(random_weights, encoder_of(hf)).extra_args, *([SWITCH] if form else [])]
    with forked_servers(), start(tmp_path, folder, tp_size=tp, extra_args=arguments) as fleet:
        receivers = SglangReceivers(fleet, ServerLayout.of(hf, tp))
        sync = WeightSync(chunks, receivers, SyncConfig(**settings), tmp_path, WorkerGroup.alone())
        push(fleet, sync, 0)
        served = engine(fleet, run=sync.run)
        served.routes = form
        before = expected()
        generated = served.generate(asked, SAMPLING, [])
        assert_equal(generated, before)
        if form is not None:
            assert chosen(generated, form) == chosen(before, form)
        assert_equal(two_turns(served, asked), two_turns(embedded, asked))
        with torch.no_grad():
            for name, parameter in chunks[0].named_parameters():
                if "visual" in name:
                    parameter.mul_(1.3)
        push(fleet, sync, 1)
        served.weight_version = 1
        after = expected()
        assert [one.logprobs for one, _ in after] != [one.logprobs for one, _ in before]
        again = served.generate(asked, SAMPLING, [])
        assert_equal(again, after)
        if form is not None:
            assert chosen(again, form) == chosen(after, form)
        sync.close()
