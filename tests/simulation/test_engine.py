"""Teams and queues: against the pipeline without overheads, and what may not happen in any run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from megarl.planning.lengths import Lengths
from megarl.simulation.engine import Faults, Simulation
from megarl.simulation.seconds import Line, Table
from megarl.simulation.system import SimTeam, System
from tests.simulation.ideal import CASES, TOKEN_S, Work, flowing, in_order, synchronous

STEPS = 30


@dataclass(frozen=True)
class OfWork(Lengths):
    """The tokens that the samples of a `Work` have."""

    work: Work = CASES["balanced"]

    def sample(self, seed, groups, samples):
        first = seed[1] * groups
        return [[round(s / TOKEN_S) for s in self.work.seconds(number)] for number in range(first, first + groups)]


def system(work, lag=0, flows=False, partial=False, servers=1) -> System:
    train = SimTeam("train", 1, 1, ("actor_train",), takes=1)
    rollout = SimTeam("draw", servers, servers, (), gives=1)
    order = "as_ready" if flows else "in_order"
    sizes = (work.groups, work.samples, 6, lag, order, partial, False, False, servers, 1, work.slots)
    return System(*sizes, train, rollout, (), {"actor_train": ("rollout",)})


def simulate(work, of, steps=STEPS, faults=None, seconds=None):
    seconds = seconds or Table(Line(TOKEN_S), nodes={"actor_train": Line(work.training_s)}, call_s=0.0)
    return Simulation(of, seconds, OfWork(1, 1, 1, work), steps, faults=faults or Faults()).run()


@pytest.mark.parametrize("case", list(CASES))
def test_without_overheads_it_is_the_ideal_pipeline(case):
    work = CASES[case]
    assert simulate(work, system(work)).ends == pytest.approx(synchronous(work, STEPS))
    for lag in (1, 2, 3):
        assert simulate(work, system(work, lag)).ends == pytest.approx(in_order(work, STEPS, lag))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_as_ready_is_the_ideal_pipeline_but_for_calls_that_are_put_off(case, partial, lag):
    work = CASES[case]
    found = simulate(work, system(work, lag, flows=True, partial=partial)).ends[-1]
    assert found == pytest.approx(flowing(work, STEPS, lag, partial=partial)[-1], rel=0.05)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_where_generation_is_slower_training_is_hidden_in_order_at_any_staleness(lag):
    work = replace(CASES["tails"], training_s=0.5)
    generation = sum(max(work.step_seconds(step)) for step in range(1, STEPS + 1))
    assert simulate(work, system(work, lag)).ends[-1] == pytest.approx(generation + work.training_s, rel=0.02)


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_older_than_allowed_and_every_group_is_trained_on_once(partial):
    work, lag = CASES["tails"], 2
    found = simulate(work, system(work, lag, flows=True, partial=partial, servers=2))
    assert max(found.age) <= lag
    assert len(found.ends) == STEPS
    lengths = [round(s / TOKEN_S) + 6 for number in range(STEPS * work.groups) for s in work.seconds(number)]
    assert sum(found.tokens) == sum(lengths)


def test_parts_of_a_step_add_up():
    work = CASES["balanced"]
    seconds = Table(Line(TOKEN_S), nodes={"actor_train": Line(3.0)}, push_s=0.5, other_s={"train": 0.25}, call_s=0.0)
    found = simulate(work, system(work), seconds=seconds)
    shares = found.shares
    assert shares.training + shares.push + shares.samples == pytest.approx(1 - 0.25 * STEPS / found.ends[-1])
    slower = simulate(work, system(work), seconds=seconds.slower_links(4))
    assert slower.ends[-1] - found.ends[-1] == pytest.approx(1.5 * STEPS)


def test_a_reference_in_a_team_of_its_own_works_beside_others():
    work = CASES["balanced"]
    made = system(work)
    others = (SimTeam("frozen", 1, 1, ("ref_logp",), takes=1, gives=1),)
    made = replace(made, others=others, waits={"actor_train": ("rollout", "ref_logp"), "ref_logp": ("rollout",)})
    nodes = {"actor_train": Line(1.0), "ref_logp": Line(2.0)}
    found = simulate(work, made, seconds=Table(Line(TOKEN_S), nodes=nodes, call_s=0.0))
    alike = simulate(work, system(work), seconds=Table(Line(TOKEN_S), nodes={"actor_train": Line(3.0)}, call_s=0.0))
    assert found.ends == pytest.approx(alike.ends)


def test_what_dies_costs_time_and_is_counted():
    work = CASES["balanced"]
    faults = Faults(device_hours=30 / 3600, server_s=5, train_s=10, save_every=5)
    for of in (system(work, 1), system(work, 2, flows=True)):
        whole, broken = simulate(work, of), simulate(work, of, faults=faults)
        assert sum(broken.failures) > 0 == sum(whole.failures)
        assert broken.ends[-1] > whole.ends[-1]
        assert len(broken.tokens) == STEPS


def test_a_slow_coordinator_is_what_bounds_a_run():
    work = CASES["balanced"]
    of = system(work, 2, flows=True, servers=8)
    fast, slow = (
        simulate(work, of, seconds=Table(Line(TOKEN_S), nodes={"actor_train": Line(0.1)}, call_s=call))
        for call in (0.001, 0.5)
    )
    assert slow.shares.coordinator > 0.9 > fast.shares.coordinator
    assert slow.step_s > 2 * fast.step_s
