"""Images in the messages of agents: what the model sees, what is recorded, and what is refused.

Tolerance: float32 of values of size 1 to 10, whose sums run in another order.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.lanes import rows_of
from megarl.disaggregated.as_ready_checkpoint import flow_files, read_buffered_groups
from megarl.gateway.images import ImageReader
from megarl.gateway.messages import ChatImage, ChatMessage
from megarl.gateway.refusals import Refusal
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.images import write_processor
from megarl.system.metrics import Metrics
from tests.gateway.playing import episodes_of
from tests.gateway.talking import VISION, file_of, picture, seeing, user
from tests.gateway.test_clients import AGENTS, embedded_engine, served_engine, turns_of
from tests.models.tiny import build_tiny
from tests.models.vlm_tiny import KINDS, in_training, of_transformers, save_config
from tests.runtime import harness

SERVED = [pytest.mark.campaign("agents"), pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("open_engine", "kind"),
    [
        pytest.param(embedded_engine, KINDS[1], id="embedded"),
        *(
            pytest.param(embedded_engine, kind, id=f"embedded-{kind}", marks=pytest.mark.campaign("agents"))
            for kind in KINDS
            if kind != KINDS[1]
        ),
        *(pytest.param(served_engine, kind, id=f"sglang-{kind}", marks=SERVED) for kind in KINDS[:2]),
    ],
)
def test_what_clients_receive_for_images_is_what_the_engine_sampled(
    single_process, open_engine, kind, tmp_path, monkeypatch
):
    """Tokens and log-probs bit for bit; those of training and of transformers to rounding, in every sequence."""
    folder, heard = tmp_path / "model", list[Any]()
    talk, reader, raw = seeing(kind, intermediate_size=128)
    reference = save_config(folder, raw)
    chunks = build_tiny(folder, vision=True)
    hf = chunks[0].hf_config
    write_metadata(folder, hf, None, torch.float32)  # as in a run with servers
    write_processor(folder, hf)
    ends = list(range(100, 600, 3))  # a random model meets one soon
    row = {"prompt": "hello", "file": str(tmp_path / "received"), "images": [picture(56, 84, 1), picture(84, 28, 2)]}
    with open_engine(chunks, folder, heard, monkeypatch) as engine:
        [episode] = episodes_of(
            engine,
            talk.template,
            talk.tokenizer,
            [talk.end, *ends],
            (AGENTS, "looks"),
            [row],
            SamplingConfig(max_new_tokens=40, stop_token_ids=ends),
            env={"history": "exact"},
            images=reader,
            prompt_tokens=16,  # in the middle of an image
            tokens=324,
            turns=12,
        )
    turns, received = turns_of(episode), json.loads((tmp_path / "received").read_text())
    assert [turns[number] for number in range(7)] == heard
    assert [turns[number] for number in range(3)] == [tuple(entry) for entry in received]
    assert sorted(lane.turn_numbers for lane in episode.all_lanes) == [[0, 1], [0, 2], [3, 4], [5, 6]]
    shown = {lane.turn_numbers[-1]: lane.images.digests for lane in episode.all_lanes}
    first, second = shown[1]
    assert set(shown.values()) == {(first, second)}
    begin, image, end = talk.tokenizer.convert_tokens_to_ids(list(VISION))
    for lane in episode.all_lanes:
        tokens = [*lane.prompt_ids, *lane.token_ids]
        # the policy may have sampled the token itself in a last turn
        said = sum(token == image and sampled for token, sampled in zip(lane.token_ids, lane.sampled, strict=True))
        assert tokens.count(image) - said == lane.images.features == 6 + 3
        for start, rows, columns, _ in lane.images.places:
            assert tokens[start - 1 : start + rows * columns + 1] == [begin, *[image] * rows * columns, end]
    files = flow_files(SimpleNamespace(dp_rank=0, is_lead=True), [], {}, {0: [episode]}, [], Metrics())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    [[kept]] = read_buffered_groups(tmp_path, 1).partials.values()
    for lane, other in zip(episode.all_lanes, kept.all_lanes, strict=True):
        assert torch.equal(lane.images.patches, other.images.patches)
    rows = rows_of(episode)
    with torch.no_grad():
        want = torch.cat([of_transformers(reference, row, reader.settings) for row in rows])
    sampled = torch.tensor([sampled for row in rows for sampled in row.sampled])
    generated = torch.tensor([logp for row in rows for logp in row.logprobs])
    torch.testing.assert_close(generated[sampled], want[sampled], atol=2e-5, rtol=0)
    torch.testing.assert_close(in_training(chunks[0], rows, reader.settings)[0], want, atol=1e-5, rtol=0)


def shown(file: bytes, text: str = "yes no") -> ChatMessage:
    """A user's message with an image in the middle."""
    return ChatMessage("user", text, images=(ChatImage(4, file, "messages[0].content[1]"),))


def read(images: ImageReader, *messages: ChatMessage) -> list[ChatMessage]:
    images.check(messages)
    return list(asyncio.run(images.read(messages)))


def test_an_image_that_is_encoded_again_is_the_same_and_one_of_another_size_is_not():
    talk, prompts, _ = seeing()
    reader, view = ImageReader(prompts, 200), picture(56, 56, 1)
    [first] = read(reader, shown(file_of(view)))
    reply = talk.say([first], "kind").reply
    assert talk.text(talk.record.nodes[0]).count(VISION[1]) == 4
    for file, cause in ((file_of(view, "BMP"), ""), (file_of(view.resize((84, 56))), "root")):
        [again] = read(reader, shown(file))
        assert talk.begin([again, reply, user("so")]).cause == cause
    [known] = read(reader, shown(file_of(view)))
    assert known.images[0].pixels is first.images[0].pixels, "it is not read again"


def test_the_text_of_an_image_is_none_and_a_reply_with_its_token_is_not_continued():
    talk, prompts, _ = seeing()
    [asked] = read(ImageReader(prompts, 200), shown(file_of(picture(28, 28, 1)), f"yes {VISION[1]}no"))
    node = talk.say([asked, user(VISION[1])], f"kind {VISION[1]}")
    node.has_image_token = talk.form.has_image_token(node.token_ids)
    assert talk.read[0].count(talk.ids(VISION[1])[0]) == 1
    assert talk.begin([asked, user(VISION[1]), node.reply, user("so")]).cause == "image_token"


@pytest.mark.parametrize(
    ("limit", "file", "words"),
    [
        ("MOST_PIXELS", file_of(picture(30, 20, 1)), "found 30 x 20 pixels; allowed: 500"),
        ("MOST_OF_CALL", file_of(picture(20, 20, 1)), "found 800 pixels in the images up to this one; allowed: 500"),
        ("", file_of(picture(400, 400, 1)), "maximum context length is 20 tokens"),
        ("", file_of(picture(600, 2, 1)), "messages[0].content[1]: the image has a size that no vision encoder"),
        ("", b"", "messages[0].content[1]: the file is not an image"),
    ],
)
def test_images_that_are_too_large_are_refused_before_they_are_decoded(limit, file, words, monkeypatch):
    _, prompts, _ = seeing()
    if limit:
        monkeypatch.setattr(f"megarl.gateway.images.{limit}", 500)
    monkeypatch.setattr("megarl.data.image_prompts.patches_of", None)
    with pytest.raises(Refusal, match=re.escape(words)):
        read(ImageReader(prompts, 20), shown(file), shown(file))


def test_a_policy_that_reads_text_names_the_image():
    with pytest.raises(Refusal, match=re.escape("messages[0].content[1]: found an image, but this policy reads text")):
        read(ImageReader(None, 20), shown(b""))


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}"
SHAPES = (
    f"data.override_chat_template={TEMPLATE}",
    *("model.tokenizer=chars:[#]nl?rgb01234.+-=xy", "model.hf_config.text_config.vocab_size=24"),
    *("data.batch_size=4", "rollout.sampling={n: 4, max_new_tokens: 3}", "rollout.limits={turns: 4, tokens: 24}"),
    *("sft.steps=0", "trainer={steps: 3, save_every: 1}", "validation.every=0", "data.max_val_samples=4"),
    *("cluster={nproc: 1, threads: 1, timeout_s: 600}", "tracking={mlflow: false, report: false}"),
    *("actor.optim.lr=1e-3", "actor.engine={micro_batch_tokens: 128}"),
)


@pytest.mark.campaign("agents")
@pytest.mark.procs
@pytest.mark.timeout(600)
def test_a_run_of_agents_that_show_a_picture_equals_one_without_agents(tmp_path):
    """Every number of training, bit for bit. With further calls other images are trained on, too."""
    function = f"{AGENTS.with_name('agents.py')}:{{}}"
    env = f"env=!replace {{{{name: agent, function: '{function}', score: reward, history: exact}}}}"
    recipe = Path("grpo_shapes_quickstart")
    plain = harness.train(recipe, tmp_path / "plain", *SHAPES)
    agents = harness.train(recipe, tmp_path / "agents", *SHAPES, env.format("asks_about_a_picture"))
    for step, numbers in plain.items():
        same = {name for name in numbers if not name.startswith(("time", "timing_s/", "perf/"))}
        assert {name: numbers[name] for name in same} == {name: agents[step][name] for name in same}
    more = harness.train(recipe, tmp_path / "more", *SHAPES, env.format("asks_about_its_half"))
    for step in (
        1,
        2,
        3,
    ):  # a row with picture and half, one with the half; and the picture's where a limit cut the reply
        rows, images = more[step]["env/samples"], more[step]["images/per_sample"]
        assert 2 <= rows <= 3
        assert rows * images == pytest.approx(rows + 1)
        assert more[step]["env/branches/root"] == 1
