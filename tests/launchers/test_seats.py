"""Which process becomes which worker of which team."""

from __future__ import annotations

import collections
import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from megarl.config.model import ParallelConfig
from megarl.dag.placement import TeamPlan
from megarl.launchers.seats import assign_seats_by_team, ranks_of, seats


def teams(*sizes: int, tp: int = 1) -> list[TeamPlan]:
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    layout = ParallelConfig(tp=tp)
    return [TeamPlan(f"team {first}", (), size, first, layout, ()) for size, first in zip(sizes, firsts, strict=True)]


def units(plans: list[TeamPlan]) -> dict[str, int]:
    """Tensor and context parallel groups."""
    return {plan.name: plan.parallel.tp * plan.parallel.cp for plan in plans}


def on(*sizes: int) -> list[tuple[str, list[str]]]:
    """As many processes on machines 0, 1, ... with a GPU each."""
    return [(str(host), [str(gpu)]) for host, size in enumerate(sizes) for gpu in range(size)]


def test_one_team_counts_node_by_node_in_the_order_of_gpus() -> None:
    places = [("b", ["1"]), ("a", ["0"]), ("b", ["0"]), ("a", ["1"])]
    assert seats(places, teams(4), {"team 0": 1}) == [1, 3, 2, 0]


def test_a_large_team_chooses_first_and_a_small_one_takes_the_tightest_machine() -> None:
    places = on(2, 4)
    plans = teams(1, 4, 1)
    found = seats(places, plans, units(plans))
    assert [places[index][0] for index in found] == ["0", *["1"] * 4, "0"]


def test_a_model_parallel_group_stays_on_one_machine() -> None:
    places = on(6, 6)
    plans = teams(2, 2, 8, tp=4)
    found = seats(places, plans, units(plans))
    actor = [places[index][0] for index in found[4:]]
    assert actor == ["0"] * 4 + ["1"] * 4


def test_workers_that_lend_gpus_to_one_server_stay_on_one_machine() -> None:
    places, plans = on(5, 3), teams(2, 6)
    found = seats(places, plans, {"team 0": 1, "team 2": 2})
    assert [places[index][0] for index in found[2:]] == ["0"] * 4 + ["1"] * 2


def test_a_team_that_fits_onto_a_machine_is_on_one_whatever_its_unit() -> None:
    places, plans = on(8, 8, 8), teams(14, 4, 6)
    found = seats(places, plans, {"team 0": 2, "team 14": 1, "team 18": 4})
    assert len({places[index][0] for index in found[18:]}) == 1


def test_a_team_with_nodes_of_its_own_is_seated_there_whatever_its_size() -> None:
    first, second, third = teams(4, 2, 2)
    # Ray has put each worker on a node of its team: 0 and 1 are of the second one.
    places = [
        ("2", ["0"]),
        ("2", ["1"]),
        ("3", ["0"]),
        ("3", ["1"]),
        ("1", ["0"]),
        ("0", ["0"]),
        ("2", ["2"]),
        ("3", ["2"]),
    ]
    plans = [first, second, third]
    found = assign_seats_by_team(places, plans, units(plans), [second.name])
    assert found[4:6] == [5, 4]
    assert sorted(found) == list(range(8))
    assert assign_seats_by_team(places, plans, units(plans), []) == seats(places, plans, units(plans))


def test_workers_are_told_their_place_in_their_team() -> None:
    places = on(4, 2)
    actor, critic = teams(2, 4)

    told = ranks_of(critic, places)

    assert [w["RANK"] for w in told] == ["0", "1", "2", "3"]
    assert [(w["LOCAL_RANK"], w["LOCAL_WORLD_SIZE"]) for w in told] == [("0", "2"), ("1", "2")] * 2
    assert [(w["GROUP_RANK"], w["GROUP_WORLD_SIZE"]) for w in told] == [("0", "2")] * 2 + [("1", "2")] * 2
    assert {w["WORLD_SIZE"] for w in told} == {"4"}
    assert {w["GROUP_WORLD_SIZE"] for w in ranks_of(actor, places)} == {"1"}


def test_the_gpus_of_all_teams_of_a_machine_are_taken_and_the_teams_own_come_first() -> None:
    actor, critic = teams(2, 4)
    assert [w["MEGARL_TRAINER_GPUS"] for w in ranks_of(critic, on(4, 2))] == ["2,3,0,1"] * 2 + ["0,1"] * 2
    assert [w["MEGARL_TRAINER_GPUS"] for w in ranks_of(actor, on(4, 2))] == ["0,1,2,3"] * 2


def crossing(hosts: list[str], unit: int) -> int:
    """Groups of `unit` ranks that are on several machines."""
    return sum(len(set(hosts[start : start + unit])) > 1 for start in range(0, len(hosts), unit))


@given(
    machines=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    split=st.sampled_from([{"tp": 2}, {"tp": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"cp": 4}, {"tp": 8}]),
    share=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_no_group_leaves_its_machine_as_long_as_one_has_room_for_it_whole(
    machines: list[int], split: dict[str, int], share: float, data: st.DataObject
) -> None:
    layout = ParallelConfig(**split)
    unit, total = layout.tp * layout.cp, sum(machines)
    assume(total >= unit)
    large = max(unit, int(share * (total // unit)) * unit)
    plans = [TeamPlan("large", (), large, 0, layout, ())]
    if large < total:
        assume(total - large <= large)
        plans.append(TeamPlan("small", (), total - large, large, ParallelConfig(), ()))
    places = data.draw(st.permutations(on(*machines)))

    hosts = [places[index][0] for index in seats(places, plans, units(plans))[:large]]

    possible = sum(size // unit for size in machines)
    assert crossing(hosts, unit) == max(0, large // unit - possible)


def test_groups_stay_whole_where_machines_hold_odd_numbers() -> None:
    places = on(1, 4, 3)
    hosts = [places[index][0] for index in seats(places, teams(8, tp=4), {"team 0": 4})]
    assert crossing(hosts, 4) == 1
    assert [w["LOCAL_RANK"] for w in ranks_of(teams(8, tp=4)[0], [(host, []) for host in hosts])] == [
        *("0", "1", "2", "3"),
        *("0", "1", "2", "0"),
    ]


def test_workers_that_only_send_requests_leave_their_gpus_to_servers() -> None:
    _, rollout = teams(2, 2)
    assert {w["MEGARL_TRAINER_GPUS"] for w in ranks_of(rollout, on(4), lends=True)} == {"0,1"}
    assert {w["MEGARL_TRAINER_GPUS"] for w in ranks_of(rollout, on(2, 2), lends=True)} == {""}


def test_workers_are_told_the_gpus_of_their_machine_that_are_for_servers() -> None:
    _, rollout = teams(2, 2)
    places = on(4)
    left = [*places[2:], ("0", ["6", "7"]), ("1", ["0"])]
    assert {w["MEGARL_SERVER_GPUS"] for w in ranks_of(rollout, places, lends=True, servers=left)} == {"2,3,6,7"}
    assert not any("MEGARL_SERVER_GPUS" in w for w in ranks_of(rollout, places))


@given(
    machines=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 31), max_size=3, unique=True),
    tp=st.sampled_from([1, 2, 4]),
)
def test_everyone_gets_one_seat_and_ranks_of_a_machine_follow_each_other_where_nothing_is_split(
    machines: list[int], cuts: list[int], tp: int
) -> None:
    total = sum(machines)
    edges = [0, *sorted(cut for cut in cuts if cut < total), total]
    plans = teams(*[b - a for a, b in itertools.pairwise(edges)], tp=tp)
    places = on(*machines)

    found = seats(places, plans, units(plans))

    assert sorted(found) == list(range(total))
    for plan in plans:
        hosts = [places[index][0] for index in found[plan.first : plan.first + plan.devices]]
        changes = sum(a != b for a, b in itertools.pairwise(hosts))
        assert tp > 1 or changes == len(collections.Counter(hosts)) - 1
