"""What moves on and off a device when phases begin and end, with models and servers that note what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.system.offload_schedule import PARTS, PHASES, OffloadSchedule, needed

ALL = frozenset(PARTS)
JUST_PARAMETERS = frozenset({"parameters"})


class Model:
    """Every change of what it holds goes to `log`."""

    def __init__(self, name: str, log: list[Any], parts: frozenset[str] = ALL) -> None:
        self.name, self.parts, self.held, self._log = name, parts, parts, log

    def hold(self, *parts: str) -> None:
        wanted = self.parts & set(parts)
        if wanted != self.held:
            self.held = wanted
            self._log.append((self.name, *sorted(wanted)))


class Servers:
    def __init__(self, log: list[Any]) -> None:
        self.held, self._log = ("kv_cache", "weights"), log

    def hold(self, *parts: str) -> None:
        self.held = parts
        self._log.append(("servers", *parts))


class Device:
    """An offload schedule with all models, and what happened on its device."""

    def __init__(self, *, offloads: bool = True, servers: bool = False) -> None:
        self.log: list[Any] = []
        self.offload = OffloadSchedule(lambda: self.log.append("meet"))
        for name, parts in (("actor", ALL), ("critic", ALL), ("reference", JUST_PARAMETERS)):
            self.offload.add(name, Model(name, self.log, parts), offloads=PARTS if offloads else ())
        self.servers = Servers(self.log)
        if servers:
            self.offload.add_servers(self.servers)

    def during(self, *phase: str) -> dict[str, frozenset[str]]:
        with self.offload.phase(*phase):
            return self.offload.resident


@pytest.mark.parametrize(
    ("phase", "actor", "critic", "reference"),
    [
        (("load",), {"parameters"}, set(), set()),
        (("start_servers",), {"parameters"}, set(), set()),
        (("resume",), {"parameters", "optimizer"}, {"parameters", "optimizer"}, set()),
        (("restore", "actor"), {"parameters", "optimizer"}, set(), set()),
        (("publish",), {"parameters"}, set(), set()),
        (("probe",), {"parameters"}, set(), set()),
        (("generate",), {"parameters"}, set(), set()),
        (("score", "actor"), {"parameters"}, set(), set()),
        (("score", "critic"), {"parameters"}, {"parameters"}, set()),
        (("score", "reference"), {"parameters"}, set(), {"parameters"}),
        (("update", "actor"), ALL, set(), set()),
        (("update", "critic"), {"parameters"}, ALL, set()),
        (("checkpoint",), {"parameters", "optimizer"}, {"parameters", "optimizer"}, set()),
        (("export", "critic"), {"parameters"}, {"parameters"}, set()),
    ],
    ids=lambda names: " ".join(names if isinstance(names, tuple) else sorted(names)),  # the same in every process
)
def test_what_is_on_the_device(phase, actor, critic, reference):
    assert Device().during(*phase) == {"actor": actor, "critic": critic, "reference": reference}


@pytest.mark.parametrize(
    ("phase", "parts"),
    [
        (("generate",), ("kv_cache", "weights")),
        (("score", "reference"), ("weights",)),
        (("update", "actor"), ()),
        (("update", "critic"), ()),
        (("checkpoint",), ("weights",)),
        (("resume",), ()),
        (("restore", "actor"), ("weights",)),
        (("probe",), ("kv_cache", "weights")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_of_servers_is_on_the_device(phase, parts):
    device = Device(servers=True)
    device.during("publish")
    device.during(*phase)
    assert device.servers.held == parts


def test_models_leave_on_all_ranks_before_servers_grow_and_come_after_servers_have_shrunk():
    device = Device(servers=True)
    device.during("publish")
    device.log.clear()
    device.during("generate")
    device.during("update", "actor")
    assert device.log == [
        ("actor",),
        "meet",
        ("servers", "kv_cache", "weights"),
        ("servers",),
        ("actor", "gradients", "optimizer", "parameters"),
    ]
    device.log.clear()
    device.during("publish")
    assert device.log == [("actor", "parameters"), "meet", ("servers", "weights")]


def test_the_actor_comes_back_for_a_server_that_was_restarted_during_generation():
    device = Device(servers=True)
    device.during("publish")
    with device.offload.phase("generate"):
        device.log.clear()
        assert device.during("catch_up")["actor"] == JUST_PARAMETERS
        assert device.log == [("actor", "parameters"), ("actor",)]
    assert device.servers.held == ("kv_cache", "weights")


def test_one_model_leaves_before_another_comes():
    device = Device()
    device.during("score", "reference")
    device.log.clear()
    device.during("update", "critic")
    assert device.log == [("reference",), ("critic", "gradients", "optimizer", "parameters")]


def test_nothing_moves_twice_and_nothing_at_the_end():
    device = Device(servers=True)
    device.during("publish")
    device.during("generate")
    device.log.clear()
    device.during("generate")
    assert device.log == []
    device.during("score", "actor")
    assert device.log == [("servers", "weights"), ("actor", "parameters")]
    device.during("update", "actor")
    assert device.offload.resident["actor"] == ALL, "the next phase decides"


@pytest.mark.parametrize("leaving", [["gradients"], ["optimizer"], ["optimizer", "gradients"], ["parameters"]])
def test_only_the_chosen_parts_leave(leaving):
    """Of the actor, whose parameters leave only with all other parts, and of a frozen model, which has nothing else."""
    log: list[Any] = []
    schedule = OffloadSchedule()
    for name, parts in (("actor", ALL), ("reference", JUST_PARAMETERS)):
        schedule.add(name, Model(name, log, parts), offloads=leaving)
    schedule.add_servers(Servers(log))
    with schedule.phase("publish"):
        pass
    with schedule.phase("generate"):
        assert schedule.resident.get("actor", ALL) == ALL.difference(leaving) | JUST_PARAMETERS
        assert schedule.resident.get("reference", JUST_PARAMETERS) == JUST_PARAMETERS.difference(leaving)
    with schedule.phase("update", "actor"):
        assert schedule.resident.get("actor", ALL) == ALL


def test_models_that_may_not_leave_stay():
    device = Device(offloads=False)
    device.during("generate")
    assert device.log == []


def test_a_phase_inside_another_gives_way_to_it_again():
    device = Device(servers=True)
    device.during("publish")
    with device.offload.phase("update", "critic"):
        device.log.clear()
        device.during("update", "actor")
        assert device.offload.resident["critic"] == ALL
    assert [entry[0] for entry in device.log if entry[0] != "servers"] == ["critic", "actor", "actor", "critic"]


def test_an_error_in_a_phase_moves_nothing_and_the_next_phase_starts_from_there():
    device = Device(servers=True)
    device.during("publish")

    def fail() -> None:
        with device.offload.phase("generate"), device.offload.phase("score", "reference"):
            device.log.clear()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert device.log == [], "the outer phase is not restored: other ranks may not come to a collective"
    assert device.offload.resident["reference"] == JUST_PARAMETERS
    assert device.during("score", "actor")["reference"] == frozenset()


def test_a_model_that_does_not_come_leaves_a_state_that_the_next_phase_can_use():
    device = Device()
    device.during("generate")
    critic = device.offload._models["critic"]
    hold, critic.hold = critic.hold, None
    with pytest.raises(TypeError):
        device.during("update", "critic")
    critic.hold = hold
    assert device.during("update", "critic")["critic"] == ALL


def test_a_model_that_comes_into_a_phase_is_put_where_the_phase_wants_it():
    device = Device()
    teacher = Model("teacher", device.log, JUST_PARAMETERS)
    with device.offload.phase("load"):
        device.offload.add("teacher", teacher, offloads=PARTS)
        assert teacher.held == frozenset()


def test_a_model_of_which_nothing_may_leave_is_never_moved():
    """Several teachers take turns by `hold`, which would move the others off the device."""
    teacher, schedule = Model("teacher", [], JUST_PARAMETERS), OffloadSchedule()
    teacher.hold = None
    schedule.add("teacher", teacher, offloads=["optimizer", "gradients"])
    with schedule.phase("score", "teacher"), schedule.phase("update", "actor"):
        assert schedule.resident == {}


def test_server_weights_that_left_are_not_used_before_they_are_published_again():
    device = Device(servers=True)
    with pytest.raises(RuntimeError, match="'generate' needs the servers' weights"):
        device.during("generate")
    device.during("publish")
    device.during("generate")
    device.during("update", "actor")
    for phase in ("generate", "probe"):
        with pytest.raises(RuntimeError, match=f"{phase!r} needs the servers' weights, .* enter phase `publish` first"):
            device.during(phase)
    device.during("publish")
    device.during("generate")


@pytest.mark.parametrize("phase", [("score", "actor"), ("checkpoint",), ("export", "critic")], ids=" ".join)
def test_what_draws_nothing_goes_without_server_weights_that_left(phase):
    device = Device(servers=True)
    device.during("publish")
    device.during("update", "actor")
    device.during(*phase)
    assert device.servers.held == (), "they would be unusable"
    with pytest.raises(RuntimeError, match="enter phase `publish` first"):
        device.during("generate")


def test_servers_that_come_between_phases_hold_nothing_before_a_publish():
    device = Device(servers=True)
    device.during("score", "actor")
    assert device.servers.held == ()
    device.during("publish")
    assert device.servers.held == ("weights",)


def test_a_finished_run_exports_its_best_actor_after_its_last():
    device = Device(servers=True)
    device.during("publish")
    for phase in [("checkpoint",), ("export", "actor"), ("restore", "actor"), ("export", "actor")]:
        device.during(*phase)


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        (("generated",), f"the offload schedule has no phase 'generated'; allowed: {', '.join(PHASES)}"),
        (("update",), "'update' was entered for the role None; allowed: one of actor, critic"),
        (("score", "critik"), "role 'critik'; allowed: one of actor, critic, reference, teacher"),
        (("generate", "actor"), "role 'actor'; allowed: none"),
    ],
)
def test_what_is_not_in_the_table_is_refused(phase, says):
    with pytest.raises(ValueError, match=says):
        Device().during(*phase)
    with pytest.raises(ValueError, match="has no role 'judge'"):
        OffloadSchedule().add("judge", Model("judge", []), offloads=PARTS)


@pytest.mark.parametrize(("colocated", "without"), [(False, set()), (True, {"probe", "generate"})])
def test_the_actor_s_parameters_leave_for_colocated_servers_only(colocated, without):
    for phase, row in PHASES.items():
        needs = needed(phase, "critic" if "role" in row else None, colocated=colocated)
        assert ("parameters" in needs.get("actor", ())) == (phase not in without)
