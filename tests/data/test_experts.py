"""Expert responses: drawn for their prompts by uid only, with all tokens trained and no invented log-probs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.correction import correct
from megarl.algorithms.objective import Objective, TokenInputs
from megarl.algorithms.stats import one_rank
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.correction import ResolvedCorrection
from megarl.config.run import RunConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.experts import Experts, open_experts
from megarl.data.fields import own_places
from megarl.data.tokenizer import character_tokenizer
from megarl.data.versions import token_versions, version_values
from megarl.rollout.seeds import Seeds
from megarl.runtime.stages.curriculum import curriculum
from megarl.runtime.stages.experts import expert_gate
from megarl.system.comm import WorkerGroup
from megarl.system.errors import DataError
from megarl.system.metrics import Metrics

N = 2  # samples of the policy for each prompt
PROMPTS = ["1+1=", "1+2=", "1+3="]
ROWS = [
    {"prompt": "1+1=", "response": "2", "logp": [-0.5, -0.1]},
    {"prompt": "1+2=", "response": "3", "logp": [-0.7, 0]},
    {"prompt": "1+2=", "response": "03", "logp": [-1, -0.2, -0.1]},
    {"prompt": "9+9=", "response": "18", "logp": [-1, -1, -1]},
]


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer("0123456789+=")


def experts_of(tmp_path: Path, tokenizer, rows=ROWS, **settings) -> Experts:
    file = tmp_path / "experts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(name="case", data={"experts": {"files": [str(file)], **settings}, "train_files": ["x.jsonl"]})
    prompts = Jagged.from_list([tokenizer(text)["input_ids"] for text in PROMPTS], dtype=torch.int64)
    made = open_experts(config, tokenizer, prompts, [], 64)
    assert made is not None
    return made


def drawn(tokenizer, prompts=PROMPTS) -> Batch:
    """N samples of each prompt."""
    given = [text for text in prompts for _ in range(N)]
    ids = Jagged.from_list([tokenizer(text)["input_ids"] for text in given], dtype=torch.int64)
    responses = Jagged.from_list([[3, 4, 1]] * len(given), dtype=torch.int64)
    every = torch.ones_like(responses.values)
    fields = {
        "prompt_ids": ids,
        "response_ids": responses,
        "response_mask": responses.like(every.bool()),
        "rollout_logp": responses.like(-every.float()),
        **version_values([[[7, 3]]] * len(given)),
    }
    columns = {
        "uid": [f"train-0-{prompts.index(text)}" for text in given],
        "sample_id": [f"{text}#{i % N}" for i, text in enumerate(given)],
        "response_text": ["12"] * len(given),
        "finish_reason": ["length"] * len(given),
    }
    return Batch(fields, columns)


def test_experts_join_the_groups_of_their_prompts_with_all_tokens_and_without_log_probs(tmp_path, tokenizer):
    experts = experts_of(tmp_path, tokenizer, in_group=True, per_group=5)
    assert experts.describe() == "experts: 3 responses to 2 of 3 prompts; 1 to other prompts dropped"
    joined = experts.added_to(drawn(tokenizer), Seeds(0))
    assert joined["source"] == ["policy"] * 2 + ["expert"] + ["policy"] * 2 + ["expert"] * 2 + ["policy"] * 2
    assert joined["uid"] == sorted(joined["uid"]), "groups stay together"
    assert own_places(joined) == [0, 1, 3, 4, 7, 8]
    assert joined["response_text"][2] == "2"
    assert sorted(joined["response_text"][5:7]) == ["03", "3"]
    rows = {name: joined[name].unbind() for name in ("response_ids", "expert_mask", "response_mask", "rollout_logp")}
    assert rows["response_ids"][2].tolist() == [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    assert rows["expert_mask"][2].tolist() == rows["response_mask"][2].tolist() == [True, True]
    assert rows["rollout_logp"][2].isnan().all(), "nobody knows it"
    assert not rows["rollout_logp"][3].isnan().any()
    assert token_versions(joined).unbind()[2].tolist() == [-1, -1]
    apart = experts_of(tmp_path, tokenizer).added_to(drawn(tokenizer), Seeds(0))
    assert not apart["response_mask"].unbind()[2].any(), "the policy loss leaves it out"
    assert apart["expert_mask"].unbind()[2].all()


def test_a_draw_depends_on_seed_and_uid_only(tmp_path, tokenizer):
    experts = experts_of(tmp_path, tokenizer, share=0.5)
    whole = {}
    for run in range(40):
        joined = experts.added_to(drawn(tokenizer), Seeds(run))
        whole[run] = [id for id in joined["sample_id"] if "#expert" in id]
        alone = [experts.added_to(drawn(tokenizer).select([2 * k, 2 * k + 1]), Seeds(run)) for k in (2, 1, 0)]
        assert sorted(id for batch in alone for id in batch["sample_id"] if "#expert" in id) == sorted(whole[run])
    drawn_of = [id for ids in whole.values() for id in ids]
    assert 20 < len(drawn_of) < 60, "half of 80 groups with responses"
    assert len({id for id in drawn_of if id.startswith("train-0-1")}) == 2, "either of two responses"


@pytest.mark.parametrize(
    ("rows", "settings", "problem"),
    [
        (ROWS[3:], {}, "no expert response answers a training prompt"),
        ([{**ROWS[0], "logp": [-0.5]}], {"logp_key": "logp"}, r"found: +'?1 entries(.|\n)*2 finite numbers"),
        ([{**ROWS[0], "logp": [-0.5, 0.1]}], {"logp_key": "logp"}, "log-probs of an expert response do not fit"),
        ([{"prompt": "1+1="}], {}, r"fix: +set data\.experts\.response_key"),
        (ROWS[:1], {"max_tokens": 2}, r"2 tokens \(.*, or data\.experts\.max_tokens\)"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_row(tmp_path, tokenizer, rows, settings, problem):
    with pytest.raises(DataError, match=problem) as error:
        experts_of(tmp_path, tokenizer, rows, **settings)
    assert "experts.jsonl" in str(error.value)


def test_log_probs_of_the_file_are_those_of_the_tokens(tmp_path, tokenizer):
    experts = experts_of(tmp_path, tokenizer, logp_key="logp", in_group=True)
    joined = experts.added_to(drawn(tokenizer), Seeds(0))
    assert joined["rollout_logp"].unbind()[2].tolist() == pytest.approx([-0.5, -0.1])


# -- what the loss makes of them ---------------------------------------------------------------------------------------


def test_the_cross_entropy_of_experts_has_its_own_divisor_and_the_policy_loss_does_not_see_them():
    """By hand: -0.5 * mean log of .05 and .9 is 1.550546; the policy's token has A r = 2."""
    logp = torch.tensor([0.4, 0.05, 0.9], dtype=torch.float64).log().requires_grad_()
    mask, expert = torch.tensor([True, False, False]), torch.tensor([False, True, True])
    unknown = torch.tensor([math.log(0.4), math.nan, math.nan], dtype=torch.float64)
    settings = AlgorithmConfig(loss={"expert_coef": 0.5})
    objective = Objective.of(settings, ResolvedCorrection())
    inputs = TokenInputs(
        torch.tensor([0, 1, 3]), torch.tensor([2.0, 0, 0]), mask, mask, rollout_logp=unknown, outside=expert,
        expert_mask=expert,
    )  # fmt: skip
    tokens, weights = objective.weigh(inputs, one_rank)
    shares = objective.expert_weights(inputs, one_rank)
    full = TokenInputs(**{**vars(inputs), "weights": weights, "expert_weights": shares})
    loss, metrics = objective.loss(logp, torch.zeros(3), full, tokens)
    loss.backward()
    assert loss.item() == pytest.approx(-2 + 0.5 * 1.550546, abs=1e-6)
    assert logp.grad.tolist() == pytest.approx([-2, -0.25, -0.25])
    assert metrics.result()["actor/expert_loss"] == pytest.approx(1.550546, abs=1e-6)
    assert all(math.isfinite(value) for value in metrics.result().values()), "the gap is that of the policy's token"


def test_correction_leaves_tokens_without_log_probs_alone():
    logp = torch.tensor([0.4, 0.2, 0.05, 0.9], dtype=torch.float64).log()
    rollout = torch.tensor([0.4, 0.4, math.nan, math.nan], dtype=torch.float64).log()
    outside, ones = torch.tensor([False, False, True, True]), torch.ones(4, dtype=torch.bool)
    parts = {"offsets": torch.tensor([0, 2, 4]), "is_level": "token", "is_batch_normalize": True, "veto": 0.6}
    both = correct(logp, rollout, ones, outside=outside, **parts)
    alone = correct(logp[:2], rollout[:2], ones[:2], **{**parts, "offsets": torch.tensor([0, 2])})
    assert both.mask.tolist() == [*alone.mask.tolist(), True, True] == [False, False, True, True], "vetoed, and experts"
    assert both.weights.tolist() == [0, 0, 1, 1]
    assert both.moments.result() == alone.moments.result()


@pytest.mark.parametrize(("gate", "learns"), [(0.0, [True, False, False]), (0.5, [True, True, False])])
def test_the_gate_switches_each_prompt(tmp_path, tokenizer, gate, learns):
    """Of the prompts' own samples 0, 1 and 2 of 2 are right; the third prompt has no experts, whatever it scores."""
    samples = experts_of(tmp_path, tokenizer, per_group=1).added_to(drawn(tokenizer), Seeds(0))
    samples.set("score", torch.tensor([0.0, 0.2, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
    c = SimpleNamespace(metrics=Metrics(), config=RunConfig(name="c", algorithm={"loss": {"expert_gate": gate}}))
    gated = expert_gate(c, samples)
    masks = [[bool(x.all()) for x in gated[name].unbind()] for name in ("response_mask", "expert_mask")]
    own, experts = ([masks[k][place] for place in places] for k, places in ((0, (0, 3, 6)), (1, (2, 5))))
    assert own == [not x for x in learns]
    assert experts == learns[:2]
    assert c.metrics.result()["experts/sft_groups"] == sum(learns) / 2


def test_past_success_is_that_of_the_policy(tmp_path, tokenizer):
    samples = experts_of(tmp_path, tokenizer).added_to(drawn(tokenizer), Seeds(0))
    samples.set("score", torch.tensor([0.0, 0.5, 9.0, 1.0, 0.0, 9.0, 0.0, 0.0]))
    seen = {}
    loader = SimpleNamespace(record=lambda means: seen.update(means) or [], shares=dict)
    layout = SimpleNamespace(dp_group=WorkerGroup.alone(), rank=0)
    curriculum(SimpleNamespace(curriculum=loader, layout=layout, metrics=Metrics()), samples)
    assert seen == {"train-0-0": 0.25, "train-0-1": 0.5, "train-0-2": 0.0}
