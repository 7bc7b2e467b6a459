"""Sequences that come back for further turns: the same tokens as from the start, whatever rows are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.embedded.rows import CacheRows
from megarl.rollout.embedded.turns import TurnSession
from megarl.rollout.engine import Request
from tests.data.templates import tokenizer_of
from tests.rollout.cases import PROMPTS, STOP, build, engine, full_forward, play_turns, sampled


@given(st.integers(1, 6), st.data())
def test_rows_follow_their_sequences_through_any_order_of_turns(slots, data):
    rows, content = CacheRows(slots), [None] * slots  # content[row]: the sequence whose keys the row really holds
    running: set[int] = set()
    ended: set[int] = set()

    def move(moves):
        content[:] = [next((content[a] for a, b in moves if b == row), content[row]) for row in range(slots)]

    for _ in range(data.draw(st.integers(1, 12))):
        idle = [s for s in range(8) if s not in running | ended]
        queue = data.draw(st.lists(st.sampled_from(idle), unique=True)) if idle else []
        first, admission = rows.running, rows.admit(queue)
        move(admission.moves)
        for sequence, row in admission.fresh:
            content[row] = sequence
        assert [s for s, _ in sorted((*admission.reused, *admission.fresh), key=lambda x: x[1])] == queue[
            : slots - first
        ]
        running |= set(queue[: slots - first])
        assert content[: len(rows.holders)] == [
            held if held != -1 else content[row] for row, held in enumerate(rows.holders)
        ]
        assert set(content[: rows.running]) == running
        if rows.running:
            over = data.draw(st.lists(st.integers(0, rows.running - 1), unique=True))
            gone = [rows.holders[row] for row in over]
            move(rows.retire(over))
            running -= set(gone)
            for sequence in gone:
                if data.draw(st.booleans()):
                    rows.forget(sequence)
                    ended.add(sequence)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def dense(single_process, request):
    return build(request.param)


@pytest.mark.parametrize(
    ("running", "stop", "model_type"),
    [
        *((3, [*"!#+7Jl"], name) for name in ("qwen3", "mistral", "qwen3_5_text", "deepseek_v3")),
        *((running, [], name) for running in (256, 1) for name in ("qwen3", "qwen3_5_text")),
    ],
)
def test_every_turn_is_what_a_generation_from_the_start_gives(single_process, running, stop, model_type):
    """Also where stop strings end turns, of which a kept row has nothing more."""
    made = engine(build(model_type), tokenizer_of("bytes"), max_running=running, max_prefill_tokens=40)
    chunk, sampling = made.chunks[0], sampled(max_new_tokens=6, stop=stop)
    for number, turns in play_turns(made, PROMPTS, stop=stop).items():
        for turn, (before, drawn, logprobs, reason) in enumerate(turns):
            [[whole]] = made.generate([Request(before, [1000 * number + turn], 6)], sampling, STOP)
            assert (whole.token_ids, whole.finish_reason) == (drawn, reason)
            expected = full_forward(chunk, before, drawn)
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop", [[], [*"!#+7Jl"]])
def test_a_state_stops_at_the_last_token_of_a_turn_however_late_the_host_looks(single_process, stop, monkeypatch):
    """A state cannot go back; a row whose stop string is found too late is read again from the start."""
    made = engine(build("qwen3_5_text"), tokenizer_of("bytes"), max_running=3)
    often = play_turns(made, PROMPTS, stop=stop)
    allocate = TurnSession._allocate

    def seldom(session, *arguments):
        slots = allocate(session, *arguments)
        session._check_every = 4
        return slots

    monkeypatch.setattr(TurnSession, "_allocate", seldom)
    late = play_turns(made, PROMPTS, stop=stop)
    drawn = [{n: [turn[1] for turn in turns] for n, turns in played.items()} for played in (late, often)]
    assert drawn[0] == drawn[1]
    for number, turns in late.items():
        for turn, (before, tokens, logprobs, _) in enumerate(turns):
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(often[number][turn][2]), rtol=0, atol=1e-5)
            assert before == often[number][turn][0], tokens


def test_whether_to_go_on_is_asked_as_often_where_turns_are_short(dense):
    """Every 8 decode steps, in however many calls."""
    generation, over, asked = engine(dense).open(sampled(ignore_eos=True), STOP, 1, 80), 0, []

    def enough() -> bool:
        asked.append(over)
        return False

    while over < 8:
        generation.submit(0, [4] * (1 + 4 * over), over, 3)
        while not (done := generation.wait(enough)):
            pass
        over += len(done)
    assert asked == [2, 5, 7]


def test_a_cache_of_fixed_layout_keeps_rows_apart_from_padding(dense, monkeypatch):
    free = play_turns(engine(dense), PROMPTS)
    from megarl.rollout.embedded import session

    allocate = session.allocate
    monkeypatch.setattr(session, "allocate", lambda mixers, room: allocate(mixers, replace(room, fixed=True)))
    monkeypatch.setattr("megarl.rollout.embedded.model.load_kernels", lambda: None)
    fixed = play_turns(engine(dense), PROMPTS)
    assert {n: [t[:2] for t in done] for n, done in fixed.items()} == {
        n: [t[:2] for t in done] for n, done in free.items()
    }


def test_the_number_of_a_forgotten_sequence_is_free_for_another_one(dense):
    """With rows for all, for some, and when the one that is forgotten never ran."""
    first, second = [5, 6, 7, 8, 9, 10], [40, 41]
    for running in (4, 1):
        made = engine(dense, max_running=running)
        generation = made.open(sampled(max_new_tokens=6), STOP, 2, 80)
        generation.submit(0, first, 1, 6)
        generation.submit(1, first, 2, 6)
        generation.abort(1)
        assert generation.wait()[1].token_ids == []
        over = generation.wait()
        for sequence in (0, 1):
            generation.forget(sequence)
            generation.submit(sequence, second, 10 + sequence, 5)
        again = {}
        while len(again) < 2:
            again |= generation.wait()
        [[whole]] = made.generate([Request(first, [1])], sampled(max_new_tokens=6), STOP)
        [others] = made.generate([Request(second, [10, 11], 5)], sampled(max_new_tokens=6), STOP)
        assert over[0].token_ids == whole.token_ids
        assert [again[0].token_ids, again[1].token_ids] == [other.token_ids for other in others]
