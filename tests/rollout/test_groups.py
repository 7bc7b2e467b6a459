"""Groups that come and go: which samples come out, in which order, and what an interruption leaves of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.rollout.engine import Request
from megarl.rollout.groups import Group, GroupGenerator
from megarl.rollout.stop_strings import StopStrings
from megarl.system.comm import team_world
from tests.data.templates import tokenizer_of
from tests.dist import fresh_parallel, run_distributed
from tests.dist import single_process as start
from tests.rollout.cases import STOP, build, engine, full_forward, logprobs, make_requests, sampled, tokens
from tests.rollout.scripted import ScriptedEngine, rule

MOST = 12
LONGEST = 20
SAMPLING = SamplingConfig(max_new_tokens=MOST)
EOS = [2, 5]


def seeds_of(number: int, samples: int) -> list[Callable[[int], int]]:
    """Stretch k of sample i of group g has the seed 1000 g + 10 i + k."""
    return [lambda turn, base=1000 * number + 10 * sample: base + turn for sample in range(samples)]


def group(number: int, prompt: list[int], samples: int) -> Group:
    return Group(number, prompt, seeds_of(number, samples))


def partial(prompt: list[int], tokens: list[int], logprobs: list[float]) -> Trajectory:
    """What one segment sampled, with version 0, of a turn that is not over."""
    made = Trajectory(prompt)
    made.add_segment(tokens, logprobs, [[0, len(tokens)]])
    return made


def scripted(made: ScriptedEngine, slots: int = 8, sampling: SamplingConfig = SAMPLING) -> GroupGenerator:
    return GroupGenerator(made, sampling, EOS, slots, LONGEST)


def opened(made: ScriptedEngine, slots: int = 8, sampling: SamplingConfig = SAMPLING) -> GroupGenerator:
    stream = scripted(made, slots, sampling)
    stream.open()
    return stream


def replay(prompt: list[int], seed: Callable[[int], int], stretches: list[list[int]]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of stretches of (version, tokens)."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for turn, (version, count) in enumerate(stretches):
        drawn = [rule([*prompt, *tokens], seed(turn), place, version) for place in range(count)]
        tokens += [token for token, _ in drawn]
        logprobs += [logprob for _, logprob in drawn]
    return tokens, logprobs


def check(prompt: list[int], seed: Callable[[int], int], sample: Trajectory) -> None:
    """It is what its stretches draw, one for each version, and ended where it had to."""
    assert (sample.token_ids, sample.logprobs) == replay(prompt, seed, sample.versions)
    assert not set(sample.token_ids[:-1]) & set(EOS)
    assert 1 <= len(sample.token_ids) <= MOST
    assert sample.finish_reason == ("stop" if sample.token_ids[-1] in EOS else "length")
    assert sample.finish_reason == "stop" or len(sample.token_ids) == MOST


def until_idle(stream: GroupGenerator) -> dict[int, list[Trajectory]]:
    found = {}
    while stream.busy:
        found |= dict(stream.wait())
    return found


def after(calls: int) -> Callable[[], bool]:
    """True from call number `calls` on."""
    counter = itertools.count(1)
    return lambda: next(counter) >= calls


def test_a_group_comes_when_all_of_its_samples_are_over_and_groups_in_the_order_of_their_numbers():
    made = ScriptedEngine(steps=lambda sequence: MOST if sequence != 1 else 1)
    stream = opened(made)
    stream.add(group(7, [1], 2))  # its second sample is slow
    stream.add(group(4, [3], 1))
    stream.add(group(3, [3], 2))
    first = stream.wait()
    assert [number for number, _ in first] == [3, 4]
    assert stream.busy
    second = stream.wait()
    assert [number for number, _ in second] == [7]
    assert not stream.busy
    assert stream.wait() == []
    for number, samples in (*first, *second):
        for seed, sample in zip(seeds_of(number, len(samples)), samples, strict=True):
            check([1] if number == 7 else [3], seed, sample)


def test_a_sample_that_is_over_gives_its_sequence_to_the_next_one_while_its_group_waits():
    made = ScriptedEngine(steps=lambda sequence: MOST if sequence else 1)
    stream = opened(made, slots=3)
    stream.add(group(0, [1], 3))
    assert stream.free == 0
    assert stream.wait(after(1)) == []
    assert stream.free == 2
    stream.add(group(1, [4, 4], 2))
    assert stream.free == 0
    assert [sequence for sequence, *_ in made.submitted] == [0, 1, 2, 1, 2]
    found = until_idle(stream)
    assert sorted(found) == [0, 1]
    assert stream.free == 3


def test_enough_ends_the_waiting():
    stream = opened(ScriptedEngine(), sampling=SamplingConfig(max_new_tokens=MOST, ignore_eos=True))
    stream.add(group(0, [1], 2))
    asked = after(3)
    assert stream.wait(asked) == []
    stream.interrupt()
    assert [len(kept.token_ids) for kept in stream.partial()[0]] == [3, 3]


def test_what_was_interrupted_goes_on_with_its_tokens_the_rest_of_its_room_and_the_next_seed():
    made = ScriptedEngine()
    stream = opened(made, sampling=SamplingConfig(max_new_tokens=MOST, ignore_eos=True))
    stream.add(group(0, [1, 3], 1))
    stream.wait(after(5))
    stream.interrupt()
    assert made.opened[0].closed
    assert (stream.busy, stream.free) == (True, 7)
    [kept] = stream.partial()[0]
    tokens, logprobs = replay([1, 3], lambda turn: turn, [[0, 5]])
    assert kept == partial([1, 3], tokens, logprobs)

    made.weight_version = 4
    stream.open()
    assert made.submitted[-1] == (0, [1, 3, *tokens], 1, MOST - 5)
    [(number, [sample])] = stream.wait()
    assert number == 0
    assert sample.versions == [[0, 5], [4, MOST - 5]]
    assert (sample.token_ids, sample.logprobs) == replay([1, 3], lambda turn: turn, sample.versions)
    assert sample.finish_reason == "length"


def test_stretches_of_one_version_are_one_run():
    stream = opened(ScriptedEngine(), sampling=SamplingConfig(max_new_tokens=MOST, ignore_eos=True))
    stream.add(group(0, [1], 1))
    for _ in range(3):
        stream.wait(after(2))
        stream.interrupt()
        stream.open()
    [(_, [sample])] = stream.wait()
    assert sample.versions == [[0, MOST]]
    stretches = [[0, 2], [0, 2], [0, 2], [0, MOST - 6]]
    assert (sample.token_ids, sample.logprobs) == replay([1], lambda turn: turn, stretches)


def test_a_sample_of_which_nothing_was_drawn_is_as_if_it_had_begun_later():
    made = ScriptedEngine()
    stream = opened(made)
    stream.add(group(0, [1], 1))
    stream.interrupt()
    assert stream.partial() == {0: [Trajectory([1])]}
    made.weight_version = 9
    stream.open()
    [(_, [sample])] = stream.wait()
    assert sample.versions == [[9, len(sample.token_ids)]]
    check([1], seeds_of(0, 1)[0], sample)


@pytest.mark.parametrize(("left", "reason"), [([7] * 11 + [3], "length"), ([7, 5], "stop")])
def test_a_draft_that_is_full_or_ends_with_an_end_token_is_over(left, reason):
    stream = opened(ScriptedEngine(), slots=1)
    kept = partial([1], left, [-1.0] * len(left))
    stream.add(group(0, [1], 1), [kept])
    assert (stream.free, kept.turn_ends) == (1, [])
    [(_, [sample])] = stream.wait()
    assert (sample.token_ids, sample.versions, sample.finish_reason) == (left, [[0, len(left)]], reason)


def test_a_group_that_an_interruption_finds_complete_comes_without_generation():
    made = ScriptedEngine()
    stream = opened(made)
    stream.add(group(0, [1], 2))
    made.opened[0].turns[0].aborted = True
    made.opened[0].turns[1].aborted = True
    made.opened[0].turns[0].sampled = [(7, -1.0), (5, -2.0)]  # it had just ended
    made.opened[0].turns[1].sampled = [(2, -3.0)]
    stream.interrupt()
    assert [kept.finish_reason for kept in stream.partial()[0]] == ["stop", "stop"]
    [(number, samples)] = stream.wait()
    assert (number, [sample.token_ids for sample in samples]) == (0, [[7, 5], [2]])
    assert not stream.busy


def test_groups_may_be_added_before_it_is_open():
    made = ScriptedEngine()
    stream = scripted(made, slots=2)
    stream.add(group(5, [1], 1))
    stream.add(group(3, [3], 1))
    assert made.submitted == []
    stream.open()
    assert [tokens for _, tokens, *_ in made.submitted] == [[3], [1]]
    assert sorted(until_idle(stream)) == [3, 5]


def test_what_is_wrong_is_refused():
    stream = opened(ScriptedEngine(), slots=3)
    stream.add(group(0, [1], 2))
    with pytest.raises(ValueError, match="group 0 is already in flight"):
        stream.add(group(0, [1], 1))
    with pytest.raises(ValueError, match="needs 2 slots, but only 1 of 3 are free"):
        stream.add(group(1, [1], 2))
    with pytest.raises(ValueError, match="1 samples and 2 partial"):
        stream.add(group(1, [1], 1), [Trajectory([1]), Trajectory([1])])
    with pytest.raises(RuntimeError, match="is open"):
        stream.partial()
    with pytest.raises(RuntimeError, match="is open"):
        stream.open()
    stream.interrupt()
    with pytest.raises(RuntimeError, match="not open"):
        stream.interrupt()


def test_closing_gives_up_everything():
    made = ScriptedEngine()
    stream = opened(made, slots=2)
    stream.add(group(0, [1], 2))
    stream.close()
    assert (stream.busy, stream.free, stream.partial(), made.opened[0].closed) == (False, 2, {}, True)
    stream.open()
    stream.add(group(0, [1], 2))
    assert list(until_idle(stream)) == [0]


@given(st.data())
def test_any_order_of_calls_gives_every_sample_once_and_as_its_stretches_draw_it(data):
    """Every `open` has a version of its own, so the runs of a sample are its stretches."""
    slots = data.draw(st.integers(1, 7), label="slots")
    pace = random.Random(data.draw(st.integers(0, 1000), label="pace"))
    made = ScriptedEngine(steps=lambda sequence: pace.choice([0, 1, 1, 2, 5]))
    stream, is_open = scripted(made, slots), False
    groups: dict[int, tuple[list[int], int]] = {}  # under way: prompt and samples
    done: set[int] = set()

    def take(found: list[tuple[int, list[Trajectory]]]) -> None:
        assert [number for number, _ in found] == sorted(number for number, _ in found)
        for number, samples in found:
            prompt, count = groups.pop(number)
            assert number not in done
            done.add(number)
            assert len(samples) == count
            for seed, sample in zip(seeds_of(number, count), samples, strict=True):
                check(prompt, seed, sample)

    for _ in range(data.draw(st.integers(1, 25))):
        call = data.draw(st.sampled_from(["add", "add", "wait", "look", "turn", "turn", "restart"]))
        if call == "add" and stream.free:
            number = data.draw(st.integers(0, 99).filter(lambda n: n not in groups and n not in done))
            prompt = data.draw(st.lists(st.integers(6, 8), min_size=1, max_size=3))
            groups[number] = prompt, data.draw(st.integers(1, stream.free))
            stream.add(group(number, prompt, groups[number][1]))
        elif call == "wait":
            found = stream.wait()
            assert found or not is_open or not stream.busy
            take(found)
        elif call == "look" and is_open:
            take(stream.wait(after(data.draw(st.integers(1, 4)))))
        elif call == "turn":
            if is_open:
                stream.interrupt()
            else:
                made.weight_version += 1
                stream.open()
            is_open = not is_open
        elif call == "restart" and not is_open:
            kept = json.loads(json.dumps({n: [asdict(t) for t in some] for n, some in stream.partial().items()}))
            stream = scripted(made, slots)
            for text, samples in kept.items():
                prompt, count = groups[int(text)]
                stream.add(group(int(text), prompt, count), [Trajectory(**sample) for sample in samples])
        assert stream.busy == bool(groups)
        assert 0 <= stream.free <= slots
    if not is_open:
        made.weight_version += 1
        stream.open()
    while stream.busy:
        take(stream.wait())
    assert not groups
    assert stream.free == slots


@pytest.fixture(scope="module")
def dense(single_process):
    return build("qwen3")


def draw(
    stream: GroupGenerator,
    requests: list[Request],
    steps: int = 2,
    each: Callable[[], None] = lambda: None,
    together: Callable[[bool], bool] = bool,
) -> list[list[Trajectory]]:
    """Groups of all requests, added as soon as there is room; a wait looks `steps` times, and `each` follows it.

    `together` says whether any rank that generates together with this one is busy.
    """
    left, found = dict(enumerate(requests)), dict[int, list[Trajectory]]()
    stream.open()
    while together(bool(left) or stream.busy):
        while left and stream.free >= len(left[min(left)].seeds):
            number = min(left)
            request = left.pop(number)
            seeds = [lambda k, s=s: s + 100_000 * k for s in request.seeds]
            stream.add(Group(number, request.prompt_ids, seeds))
        found |= dict(stream.wait(after(steps)))
        each()
    stream.close()
    return [found[number] for number in range(len(requests))]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("slots", "running"), [(7, 256), (7, 3)])
def test_without_interruption_samples_are_those_of_generate(single_process, model_type, slots, running):
    """Experts go in rounds."""
    made, requests = engine(build(model_type), max_running=running), make_requests(count=8)
    expected = made.generate(requests, sampled(), STOP)
    found = draw(GroupGenerator(made, sampled(), STOP, slots, 40), requests)
    for group, whole in zip(found, expected, strict=True):
        assert [(c.token_ids, c.finish_reason, c.versions) for c in group] == [
            (c.token_ids, c.finish_reason, c.versions) for c in whole
        ]
        for sample, other in zip(group, whole, strict=True):
            torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)


def test_a_synchronous_step_is_one_call_of_generate_bit_for_bit(dense):
    made, requests = engine(dense), make_requests(count=8)
    whole, counted = GroupGenerator(made, sampled(), STOP, 40, 40), []
    for number, request in enumerate(requests):
        whole.add(Group(number, request.prompt_ids, [lambda k, s=s: s + k for s in request.seeds]))
    found = whole.finish(counted.append)
    assert (whole.busy, whole.free, sum(counted)) == (False, 40, sum(len(request.seeds) for request in requests))
    drawn = made.generate(requests, sampled(), STOP)
    assert [[(t.token_ids, t.logprobs, t.finish_reason, t.versions) for t in some] for some in found] == [
        [(c.token_ids, c.logprobs, c.finish_reason, c.versions) for c in some] for some in drawn
    ]


def test_a_stop_string_may_begin_before_an_interruption_and_end_after_it(dense, monkeypatch):
    """After each token, so that every string of two tokens does, and with rows that wait in the queue."""
    monkeypatch.setattr("megarl.rollout.embedded.turns._LOOK_EVERY", 1)
    requests, tokenizer = make_requests(count=5), tokenizer_of("bytes")
    made, across = engine(dense, tokenizer, max_running=8), 0

    def interrupted(**settings: Any) -> list[list[Trajectory]]:
        sampling = sampled(max_new_tokens=8, **settings)
        stream = GroupGenerator(made, sampling, STOP, 15, 40, strings=StopStrings.of(sampling, tokenizer))
        return draw(stream, requests, 1, lambda: (stream.interrupt(), stream.open()))

    free = interrupted()
    texts = [tokenizer.decode(group[0].token_ids[3:5]) for group in free]
    wanted = [text for text in texts if len(text) > 1 and "\ufffd" not in text]
    strings = StopStrings(wanted, tokenizer)
    for group, others in zip(interrupted(stop=wanted), free, strict=True):
        for sample, other in zip(group, others, strict=True):
            end = strings.end(other.token_ids)
            assert sample.token_ids == other.token_ids[:end]
            assert sample.logprobs == pytest.approx(other.logprobs[:end], abs=1e-5)
            assert sample.finish_reason == (other.finish_reason if end is None else "stop")
            across += end is not None and sample.segments > 1
    assert across > 1


def test_a_partial_turn_that_has_a_stop_string_by_the_settings_of_now_is_over():
    tokenizer, sampling = tokenizer_of("bytes"), SamplingConfig(max_new_tokens=MOST, stop=["b!"])
    ids = tokenizer("ab!", add_special_tokens=False)["input_ids"]
    strings = StopStrings.of(sampling, tokenizer)
    made = ScriptedEngine()
    stream = GroupGenerator(made, sampling, EOS, 2, LONGEST, strings=strings)
    stream.add(group(0, [8], 2), [partial([8], ids[:k], [-1.0] * k) for k in (len(ids), len(ids) - 1)])
    [over, going_on] = stream.partial()[0]
    assert (over.finish_reason, over.ended_by, going_on.ended_by) == ("stop", "answer", "")
    stream.open()
    assert [(turn.before, turn.begun) for turn in made.opened[0].turns.values()] == [([8, *ids[:-1]], len(ids) - 1)]


@pytest.mark.parametrize(("moment", "running"), [(8, 256), (1, 4), (5, 4)])
def test_whenever_it_is_interrupted_log_probs_are_those_of_a_full_pass(dense, monkeypatch, moment, running):
    """Every `moment` steps, and with few rows also while samples wait that have not begun."""
    monkeypatch.setattr("megarl.rollout.embedded.turns._LOOK_EVERY", 1)
    made, requests = engine(dense, max_running=running), make_requests(count=5)
    stream = GroupGenerator(made, sampled(), STOP, 9, 40)
    waits = itertools.count()

    def each() -> None:
        if next(waits) < 6:
            stream.interrupt()
            stream.open()

    found, free = draw(stream, requests, moment, each), made.generate(requests, sampled(), STOP)
    same = 0
    for request, group, whole in zip(requests, found, free, strict=True):
        for sample, other in zip(group, whole, strict=True):
            n = len(sample.token_ids)
            assert n == 20 or sample.token_ids[-1] in STOP
            assert sample.versions == [[0, n]]
            expected = full_forward(dense[0], request.prompt_ids, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-5)
            same += sample.token_ids == other.token_ids
    assert same < 15  # stretches after the first have other seeds


def test_a_stretch_after_new_weights_is_theirs_and_the_ones_before_keep_what_they_were_drawn_with(single_process):
    chunks = build("qwen3")
    made, weight = engine(chunks), chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data
    made.weight_version = 3
    sampling = sampled(ignore_eos=True)
    stream = GroupGenerator(made, sampling, STOP, 2, 40)
    stream.open()
    stream.add(group(0, [4, 8, 15], 2))
    assert stream.wait(after(1)) == []
    stream.interrupt()
    before = weight.clone()
    weight.add_(0.05)
    made.weight_version = 4
    stream.open()
    [(_, samples)] = stream.wait()
    for sample in samples:
        (old, cut), (new, rest) = sample.versions
        assert (old, new, cut + rest, sample.finish_reason) == (3, 4, 20, "length")
        theirs = full_forward(chunks[0], [4, 8, 15], sample.token_ids)[cut:]
        torch.testing.assert_close(torch.tensor(sample.logprobs[cut:]), theirs, rtol=0, atol=1e-5)
    new_weight = weight.clone()
    weight.copy_(before)
    for sample in samples:
        cut = sample.versions[0][1]
        theirs = full_forward(chunks[0], [4, 8, 15], sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs[:cut]), theirs[:cut], rtol=0, atol=1e-5)
        assert not torch.allclose(torch.tensor(sample.logprobs[cut:]), theirs[cut:], atol=1e-3)
    weight.copy_(new_weight)


def in_layout(model: str, layout: dict[str, int]) -> list[Any]:
    """Tokens and log-probs of groups that the first replica draws, interrupted after every wait; others draw none."""
    from megatron.core import parallel_state as mpu

    fresh_parallel(**layout)
    world = team_world(120)
    stream = GroupGenerator(engine(build(model, **layout)), sampled(), STOP, 9, 40)
    requests = make_requests(count=4) if mpu.get_data_parallel_rank() == 0 else []

    def again() -> None:
        stream.interrupt()
        stream.open()

    found = draw(stream, requests, 1, again, lambda busy: any(world.all_gather_json(busy)))
    return [tokens(found), logprobs(found)]


def in_layouts(layouts: list[tuple[str, dict[str, int]]]) -> list[Any]:
    return [in_layout(model, layout) for model, layout in layouts]


@pytest.mark.procs
def test_ranks_of_a_replica_and_replicas_that_share_experts_are_interrupted_together():
    layouts = [("qwen3", {"tp": 2}), ("qwen3", {"pp": 2}), ("qwen3_moe", {"ep": 2})]
    start()
    expected = in_layouts([(model, {}) for model, _ in layouts])
    first, second = run_distributed(in_layouts, 2, 200, layouts)
    for (_, layout), (want, wanted), (found, logps), (other, _) in zip(layouts, expected, first, second, strict=True):
        assert found == want
        assert other == ([] if "ep" in layout else want)
        torch.testing.assert_close(logps, wanted, rtol=0, atol=1e-5)
