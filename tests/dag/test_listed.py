"""A pipeline that the recipe lists: the graph of the Python form, located errors, and stages that are called again."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megarl
from megarl.config.load import load_config
from megarl.dag import retry
from megarl.dag.executor import Executor, NodeError
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Role, stage
from megarl.data.batch import Batch
from megarl.recipes.build import build_task_graph
from megarl.recipes.listed import STAGES as NAMES
from megarl.system.errors import UserError
from megarl.system.metrics import Metrics

STAGES = """
from megarl.dag.stage import Role, stage

@stage(reads=["token_rewards"], writes=["token_rewards"], role=Role.REWARD, retries_on=[ConnectionError])
def price(c, samples, price): ...

def one(c, samples): ...
"""


def graph(listed: str, *more: str):
    return build_task_graph(load_config("grpo_quickstart", [f"algorithm.pipeline={listed}", *more]))


GRPO = "[rollout, scoring, advantages, actor_train]"
KTO = "preference={loss: kto}"


@pytest.mark.parametrize(
    ("listed", "name", "more"),
    [
        (GRPO, "grpo", ()),
        (GRPO, "grpo", ("rollout_correction.preset=decoupled_token_is", "algorithm.kl={use: reward, coef: 0.1}")),
        ("[ref_logp, mismatched_ref_logp, kto_train]", "kto", (KTO,)),
        ("[reward_model_train]", "reward_model", ("preference={loss: bradley_terry}",)),
        ("[rollout, episode_reward, logprobs, advantages, actor_train]", "srpo", ("robot={}",)),
    ],
)
def test_the_list_is_the_graph_of_the_built_in_pipeline(listed, name, more):
    listed, built_in = graph(listed, *more), graph(name, *more)
    assert listed.entry == built_in.entry
    assert [(node.id, node.func, node.contract) for node in listed] == [(n.id, n.func, n.contract) for n in built_in]
    assert all(listed.parents(id) == built_in.parents(id) for id in built_in.order())


def test_every_stage_of_megarl_has_a_name():
    root = Path(megarl.__file__).parent
    written = [*root.glob("runtime/stages/*.py"), *root.glob("robots/**/*.py")]
    declared = (
        re.findall(r"^@(?:stage|trains|_scores)\b.*?^def (\w+)", file.read_text(), re.M | re.S) for file in written
    )
    assert {*NAMES} == {name for names in declared for name in names}
    assert all(NAMES[node.id] is node.func for node in graph("grpo"))


def test_a_node_has_its_settings(tmp_path):
    (tmp_path / "own.py").write_text(STAGES)
    own = f"{{stage: {tmp_path}/own.py:price, id: toll, config: {{price: 0.1}}, retry: 2, after: [rollout]}}"
    node = graph(f"[rollout, scoring, {own}, advantages, actor_train]")["toll"]
    assert (node.config, node.retry, node.deps) == ({"price": 0.1}, 2, ("rollout",))


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("[rolout]", ("algorithm.pipeline[0]: unknown stage", "did you mean rollout?")),
        ("[rollout, {stage: scoring, retry: 1}]", ("algorithm.pipeline[1]: scoring is a block", "'retry'")),
        ("[{stag: rollout}]", ("algorithm.pipeline[0]: unknown key stag", "did you mean stage?", "stage is missing")),
        ("[{stage: rollout, retry: -1}]", ("algorithm.pipeline[0]: retry is out of range", "integer >= 0")),
        ("[rollout, scoring, {stage: advantage, retry: 1}]", ("node 'advantage': the node has a retry", "retries_on")),
        ("[rollout, scoring, {stage: FILE:price}]", ("takes 'price'", "give the node the config {'price': ...}")),
        ("[rollout, scoring, {stage: FILE:one, retry: 1}]", ("node 'one': the node has a retry",)),
        ("[rollout, FILE:nothing]", ("node 'nothing'", "has no 'nothing'")),
        ("[ref_logp, dpo_train]", ("preference: the pipeline dpo learns from pairs",)),
        ("[rollout, advantage]", ("pipeline 'listed': node 'advantage' reads 'token_rewards'",)),
        ("[]", ("pipeline 'listed': the pipeline has no nodes",)),
    ],
)
def test_what_is_wrong_in_a_list_is_located(tmp_path, listed, words):
    (tmp_path / "own.py").write_text(STAGES)
    with pytest.raises(UserError) as error:
        graph(listed.replace("FILE", f"{tmp_path}/own.py"))
    assert all(word in str(error.value) for word in words)


def test_an_attempt_begins_with_the_same_seeds_and_metrics(monkeypatch, capsys):
    drawn, pauses = [], []
    monkeypatch.setattr(retry.time, "sleep", pauses.append)

    @stage(reads=["seen"], writes=["x", "seen"], role=Role.REWARD, retries_on=[ConnectionError])
    def asks_a_service(c, samples, failures):
        assert not samples["seen"].any(), "an attempt begins with the same samples"
        samples["seen"].add_(1)
        drawn.append((random.random(), float(torch.rand(()))))
        c.metrics.sum("asked", 1)
        if len(drawn) <= failures:
            raise ConnectionError("the service is busy")
        samples.set("x", torch.zeros(len(samples)))
        return samples

    def run(failures: int, retries: int) -> dict[str, float]:
        drawn.clear()
        p = Pipeline("p").add(asks_a_service, "ask", config={"failures": failures}, retry=retries)
        context = SimpleNamespace(metrics=Metrics())
        context.metrics.sum("before", 1)
        Executor(p.build(["prompt_ids", "seen"])).run(
            context, Batch({"prompt_ids": torch.zeros(2), "seen": torch.zeros(2)})
        )
        return context.metrics.result()

    assert run(2, 3) == {"before": 1, "asked": 1, "retries/ask": 2}
    assert len(drawn) == 3
    assert len(set(drawn)) == 1
    assert pauses == [1, 2]
    assert "node 'ask': attempt 1 of 4 failed: ConnectionError: the service is busy" in capsys.readouterr().out
    with pytest.raises(NodeError, match=r"node .ask. .* failed: ConnectionError: the service is busy"):
        run(3, 2)
    assert len(drawn) == 3
