"""What a resumed run says of changed settings, and that it is so."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algorithms.kl import KLController
from megarl.config.fields import iter_keys, names_component
from megarl.config.run import RunConfig
from megarl.runtime import checkpoints
from megarl.runtime import resume_compatibility as changes
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.resume_compatibility import EFFECTS, announcements, changed_keys
from megarl.runtime.start import set_schedule_lengths
from megarl.system.errors import ConfigError
from megarl.system.offload_schedule import OffloadSchedule
from megarl.training import checkpoint

ADAPTIVE = {"use": "reward", "adaptive": True}


def config(**sections: Any) -> dict[str, Any]:
    return RunConfig(name="case", **sections).model_dump(mode="json")


def test_every_key_of_a_recipe_is_in_the_table_and_nothing_else():
    keys = {key.path: key.section for key in iter_keys()}
    assert EFFECTS.keys() <= keys.keys()
    for path, section in keys.items():
        if section is None:
            changes.effect_of(path, config(), config(), "train")  # KeyError: say what a resumed run does with it
    doubled = [path for path in EFFECTS if any(path.startswith(f"{other}.") for other in EFFECTS)]
    assert not doubled, "one line for each key"


def test_changed_settings_are_named_those_of_free_form_too():
    before = config(trainer={"steps": 3}, data={"train_files": ["x"], "loader_kwargs": {"low": 1, "ops": "+"}})
    now = config(
        trainer={"steps": 5, "resume": "never"}, data={"train_files": ["y"], "loader_kwargs": {"low": 2, "high": 9}}
    )
    assert list(changed_keys(before, now)) == [
        ("data.train_files", ["x"], ["y"]),
        ("data.loader_kwargs.low", 1, 2),
        ("data.loader_kwargs.ops", "+", "not set"),
        ("data.loader_kwargs.high", "not set", 9),
        ("trainer.steps", 3, 5),
    ]
    del before["data"]["shuffle"], now["trainer"]["seed"]  # keys of another version
    assert len(list(changed_keys(before, now))) == 5


def test_a_section_that_was_not_there_is_one_change():
    before, now = config(), config(critic={"parallel": {"tp": 2}})
    assert [key for key, _, _ in changed_keys(before, now)] == ["critic.parallel"]


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (
            {"trainer": {"seed": 0}},
            {"trainer": {"seed": 1}},
            ["trainer.seed: 0 -> 1 (used for what is sampled from now on"],
        ),
        ({}, {"data": {"shuffle": False}}, ["data.shuffle: True -> False (not used: the prompts keep the order"]),
        ({}, {"model": {"init_seed": 3}}, ["model.init_seed: 0 -> 3 (not used: the weights are those"]),
        ({}, {"validation": {"before_train": False}}, ["before_train: True -> False (not used"]),
        ({}, {"sft": {"steps": 9}}, ["sft.steps: 0 -> 9 (not used: the cold start is over)"]),
        ({}, {"actor": {"optim": {"lr": 1e-3}}}, ["actor.optim.lr: 1e-06 -> 0.001"]),
        ({}, {"algorithm": {"kl": {"coef": 0.5}}}, ["algorithm.kl.coef: 0.001 -> 0.5"]),
        (
            {"algorithm": {"kl": ADAPTIVE}},
            {"algorithm": {"kl": {**ADAPTIVE, "coef": 0.5}}},
            ["algorithm.kl.coef: 0.001 -> 0.5 (not used: the adaptive"],
        ),
    ],
)
def test_what_does_not_take_effect_says_so(before, now, lines):
    found = announcements(config(**before), config(**now), "train")
    assert len(found) == len(lines)
    for line, start in zip(found, lines, strict=True):
        assert start in line
        assert line.endswith(")") == ("(" in start)


@pytest.mark.parametrize("section", [key.path for key in iter_keys() if names_component(key.section)])
def test_a_changed_own_key_of_a_component_is_used(section):
    def recipe(most: float) -> dict[str, Any]:
        plain = config()
        nested = plain["algorithm"][section.partition(".")[2]]
        nested |= {"most": most, "table": {"low": most}}
        return plain

    assert announcements(recipe(0.5), recipe(0.9), "train") == [
        f"{section}.most: 0.5 -> 0.9",
        f"{section}.table.low: 0.5 -> 0.9",
    ]


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({"reward": {"kwargs": {"most": 1}}}, {"reward": {"kwargs": {"most": 2}}}, ["reward.kwargs.most: 1 -> 2"]),
        ({"env": {"name": "a.py:A", "turns": 1}}, {"env": {"name": "a.py:A", "turns": 2}}, ["env.turns: 1 -> 2"]),
    ],
)
def test_a_changed_argument_of_a_reward_or_environment_is_used(before, now, lines):
    assert announcements(config(**before), config(**now), "train") == lines


MODELS = {"models": {"judge": {"path": "a"}, "proposer": {"train": True}}, "policies": {"solver": {}}}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"models.judge.path": "b"}, "models.judge.path: a -> b"),
        ({"models.proposer.optim.lr": 1e-3}, "models.proposer.optim.lr: 1e-06 -> 0.001"),
        ({"models.proposer.path": "b"}, "models.proposer.path: None -> b (not used: the weights are those of"),
        ({"policies.solver.sampling.max_new_tokens": 9}, "policies.solver.sampling.max_new_tokens: None -> 9"),
    ],
)
def test_changes_of_further_models_and_policies_are_named(changed, line):
    now = config(**MODELS)
    for key, value in changed.items():
        *above, last = key.split(".")
        changes.value_at(now, ".".join(above))[last] = value
    (said,) = announcements(config(**MODELS), now, "train")
    assert said.startswith(line)


def test_a_checkpoint_without_a_trained_model_is_not_continued_with_it():
    now = config(**{**MODELS, "models": {**MODELS["models"], "critic_2": {"train": True}}})
    with pytest.raises(ConfigError, match=r"fix:     remove models.critic_2; trainer.resume=never"):
        announcements(config(**MODELS), now, "train")
    now["models"]["critic_2"]["train"] = False
    assert len(announcements(config(**MODELS), now, "train")) == 1


@pytest.mark.parametrize(
    ("now", "late"),
    [
        ({"rollout": {"sampling": {"n": 3}}}, True),
        ({"reward": {"kwargs": {"most": 2}}}, True),
        ({"async": {"max_staleness": 1}}, True),
        ({"trainer": {"seed": 1}}, True),
        ({"data": {"shuffle": False}}, False),  # not used in any step
        ({"data": {"val_batch_size": 3}}, False),
        ({"actor": {"ppo_epochs": 2}}, False),
    ],
)
def test_what_is_drawn_already_is_not_drawn_with_changed_settings(now, late):
    (usual,) = announcements(config(), config(**now), "train")
    (line,) = announcements(config(), config(**now), "train", generated=4)
    assert "step 5" not in usual
    assert line.endswith("from step 5 on: samples until step 4 are generated and scored already)") == late


READY = {"max_staleness": 2, "order": "as_ready"}


def test_what_is_ready_stays_as_it_is_and_what_is_not_takes_new_settings():
    before = config(**{"async": READY})
    now = config(**{"async": {**READY, "partial": True}, "reward": {"kwargs": {"most": 2}}})
    late, at_once = announcements(before, now, "train", generated=4)
    assert late.endswith("(not used for finished groups in the checkpoint, which are generated and scored already)")
    assert at_once == "async.partial: False -> True"


@pytest.mark.parametrize(("of_async", "chosen"), [(READY, True), ({"max_staleness": 2}, False)])
def test_what_is_ready_was_chosen_with_the_filter_of_then(of_async, chosen):
    before, now = (config(**{"async": of_async}, algorithm={"filter": {"high": high}}) for high in (0.9, 0.8))
    (line,) = announcements(before, now, "train", generated=4)
    assert ("not used for finished groups" in line) == chosen


def test_less_staleness_draws_again_what_would_be_too_old():
    more, less = config(**{"async": READY}), config(**{"async": {**READY, "max_staleness": 1}})
    assert "generated again" in announcements(more, less, "train", generated=4)[0]
    assert announcements(less, more, "train", generated=4) == ["async.max_staleness: 1 -> 2"]


def test_the_settings_of_sft_take_effect_in_sft():
    before, now = config(), config(sft={"steps": 9})
    assert announcements(before, now, "sft") == ["sft.steps: 0 -> 9"]


def test_a_checkpoint_of_float32_has_no_master_weights():
    fp32, bf16 = config(model={"dtype": "fp32"}), config()
    with pytest.raises(ConfigError, match=r"model\.dtype: (?s:.*)bf16(?s:.*)fp32(?s:.*)model\.dtype=fp32"):
        announcements(fp32, bf16, "train")
    assert "without their master weights" in announcements(bf16, fp32, "train")[0]


def test_epochs_do_not_count_steps_whose_batches_had_another_size():
    before = config(trainer={"epochs": 2}, data={"batch_size": 10}, sft={"epochs": 2, "batch_size": 10})
    now = config(trainer={"epochs": 2}, data={"batch_size": 40}, sft={"epochs": 2, "batch_size": 40})
    told = r"sft\.batch_size: (?s:.*)40(?s:.*)sft\.epochs=null and sft\.steps=22,"
    with pytest.raises(ConfigError, match=told):
        changes.refuse_other_batches(15, {"samples": 200}, before, now, "sft")
    told = r"data\.batch_size: (?s:.*)40(?s:.*)trainer\.epochs=null and trainer\.steps=22,"
    with pytest.raises(ConfigError, match=told):  # 2 x 200 prompts: 15 steps of 10, 6.25 of 40; not 10 steps in all
        changes.refuse_other_batches(15, {"samples": 200}, before, now)
    changes.refuse_other_batches(0, {"samples": 200}, before, now)
    changes.refuse_other_batches(15, {"samples": 200}, before, before)
    changes.refuse_other_batches(15, {"samples": 200}, before, config(trainer={"steps": 22}, data={"batch_size": 40}))


def rates(before: dict[str, Any], now: dict[str, Any], step: int) -> tuple[int, int]:
    """Updates that the actor has made after `step` by the one recipe, and those that its schedule has in the other."""
    old, new = (RunConfig(name="case", **sections) for sections in (before, now))
    engine = SimpleNamespace(
        step=old.updates(old.actor) * step // old.trainer.steps, total_steps=new.updates(new.actor)
    )
    set_schedule_lengths(
        SimpleNamespace(config=new, context=SimpleNamespace(step=step, resting=0), trained={"actor": engine})
    )
    return engine.step, engine.total_steps


def test_a_schedule_ends_with_the_run_where_steps_have_more_or_fewer_updates_than_before():
    whole, twice = {"trainer": {"steps": 10}}, {"trainer": {"steps": 10}, "actor": {"ppo_epochs": 2}}
    assert rates(twice, whole, 5) == (10, 15), "it does not count as the end of 10 updates"
    assert rates(whole, twice, 5) == (5, 15)
    assert rates(twice, twice, 5) == (10, 20)
    assert rates(whole, {"trainer": {"steps": 14}}, 10) == (10, 14)


def test_the_schedule_of_an_actor_that_rests_and_of_its_critic_are_those_of_the_undisturbed_run():
    recipe = RunConfig(name="case", trainer={"steps": 10}, critic={"ppo_epochs": 3, "warmup_steps": 4})
    for step in (2, 4, 7):
        actor = SimpleNamespace(step=max(step - 4, 0), total_steps=0)
        critic = SimpleNamespace(step=3 * step, total_steps=0)
        engines = {"actor": actor, "critic": critic}
        set_schedule_lengths(
            SimpleNamespace(config=recipe, context=SimpleNamespace(step=step, resting=4), trained=engines)
        )
        assert actor.total_steps == recipe.updates(recipe.actor, 4)
        assert critic.total_steps == recipe.updates(recipe.critic)


def restored(monkeypatch, state: dict[str, Any], **sections: Any) -> tuple[SimpleNamespace, Checkpoints]:
    """A controller of this configuration after the checkpoint `state` was loaded into it."""
    monkeypatch.setattr(checkpoint, "load", lambda *args: (7, state))
    monkeypatch.setattr(checkpoints, "read_surplus", lambda *args: None)
    monkeypatch.setattr(Checkpoints, "_has", lambda self, step: True)
    settings = RunConfig(name="case", **sections)
    kl = settings.algorithm.kl
    controller = KLController(kl.coef, kl.target if kl.adaptive else None, kl.horizon)
    loader = SimpleNamespace(load_state_dict=lambda state: None)
    c = SimpleNamespace(
        config=settings,
        run_dir=checkpoints.Path(),
        layout=SimpleNamespace(world=None),
        hf_config=None,
        team=SimpleNamespace(buffer=None),
        kl_controller=controller,
        baselines=loader,
        loading=loader,
        trained={},
        offload=OffloadSchedule(),
        scores=None,
        replay=None,
        oversampling=None,
    )
    c.context = c
    found = Checkpoints(c)
    found.load(checkpoints.Path())
    return c, found


def state(**values: Any) -> dict[str, Any]:
    best = {"best": 0.8, "best_step": 5, "best_metric": "val/acc"}
    return {"loader": {}, "kl": {"coef": 0.3}, "surplus_parts": 0, **best, **values}


def test_a_changed_kl_coefficient_is_used_unless_it_adapts(monkeypatch):
    fixed, _ = restored(monkeypatch, state(), algorithm={"kl": {"use": "reward", "coef": 0.9}})
    assert fixed.kl_controller.coef == 0.9
    adaptive, _ = restored(monkeypatch, state(), algorithm={"kl": {**ADAPTIVE, "coef": 0.9}})
    assert adaptive.kl_controller.coef == 0.3
    fresh, _ = restored(monkeypatch, state(kl={}), algorithm={"kl": {**ADAPTIVE, "coef": 0.9}})
    assert fresh.kl_controller.coef == 0.9, "it did not adapt before"


def test_the_best_value_of_another_metric_is_forgotten(monkeypatch):
    assert restored(monkeypatch, state())[1].best == 0.8
    assert restored(monkeypatch, state(), trainer={"best_metric": "critic/score/mean"})[1].best == -math.inf
    assert restored(monkeypatch, state(best=None))[1].best == -math.inf
