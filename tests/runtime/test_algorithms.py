"""Every estimator and every loss makes real training steps from a recipe that only names it."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import shutil
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.losses.base import LossInputs
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.dag.guard import GuardedBatch
from megarl.dag.stage import contract_of
from megarl.recipes.components import COMPONENTS
from megarl.runtime import stages
from megarl.system.errors import ConfigError
from tests.forked import forked_scorers
from tests.house.test_docs import code_with
from tests.runtime import harness
from tests.runtime.test_teams import assert_near, of_training, placed

REWARD = """
def parts(samples, whole=False):
    for sample in samples:
        ended = whole and sample["finish_reason"] == "stop"
        assert sample["response"].endswith("<eos>") == ended, "reward.skip_special_tokens"
    return [
        {"overall": digits + right, "digits": digits, "right": right}
        for digits, right in ((sum(c.isdigit() for c in s["response"]) / 6, float(s["response"] == s["answer"]))
                              for s in samples)
    ]
"""
ONE_PROCESS = [
    *("cluster.nproc=1", "sft.steps=0", "data.val_files=[]", "validation.every=0", "algorithm.kl.use=none"),
    *("trainer.steps=2", "trainer.save_every=0", "trainer.best_metric=null", "trainer.export_hf=false"),
    *("data.batch_size=4", "rollout.sampling.n=3", "rollout.sampling.max_new_tokens=4"),
    "tracking.peak_tflops=1.0",
]
NEEDS: dict[str, list[str]] = {
    "gigpo": [*harness.GUESSING],
    "gdpo": ["algorithm.advantage.parts={digits: 1.0, right: 2.0}"],
    "reverse_kl": ["teacher.path=TEACHER"],
    "clip_cov": ["algorithm.loss.cov_fraction=0.2", "algorithm.loss.cov_low=0.0"],
    "kl_cov": ["algorithm.loss.cov_fraction=0.2"],
    "pg_is": ["rollout_correction.preset=pg_is"],
    **{name: ["rollout_correction.preset=ppo_is_bypass"] for name in ("ipo", "kpop", "opsm", "vespo")},
    "luffy": ["data.experts={files: [FOLDER/experts.jsonl], in_group: true, per_group: 2, share: 0.8}"],
    "gspo": ["algorithm.loss.aggregation=seq-mean-token-mean"],
    "gmpo": ["algorithm.loss.aggregation=seq-mean-token-mean"],
}
DISTILLATION = ["algorithm.distillation.coef=0.5", "teacher.path=TEACHER"]
TWO_TEACHERS = "distillation over the whole vocabulary, two teachers"
FURTHER = [
    "algorithm.pipeline=FOLDER/my_models.py:build_graph",
    "models={imitator: {train: true, optim: {lr: 0.002}, engine: {offload: true}}}",
]
#: A proposer's turn, and two of a solver; the digits among their characters are the rewards.
AGENT = """
import json, os, urllib.request

def ask(policy, prompt, n=1):
    body = json.dumps({"model": policy, "prompt": prompt, "n": n}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return [choice["text"] for choice in json.load(response)["choices"]]

def play(task):
    (said,) = ask("proposer", task["row"]["prompt"])
    digits = [sum(c.isdigit() for c in text) / 4 for text in ask("solver", said[:2] + "=", 2)]
    return {"rewards": {"proposer": 1 - sum(digits) / 2, "solver": digits}}
"""
POLICIES = [
    *("reward={name: exact_match}", "env={name: agent, function: FOLDER/proposing.py:play, timeout_s: 60}"),
    "policies={proposer: {advantage: {name: rae}}, solver: {advantage: {name: rloo}, compare: episode}}",
]
FEW = "data.batch_size=2"  # programs of agents are most of such a step
OWN_WEIGHTS = ["models={proposer: {train: true, optim: {lr: 0.002}}}", "policies.proposer.model=proposer"]
FULL = "KL over the whole vocabulary"
WHOLE = "distillation over the whole vocabulary"
DAPO = ["algorithm.pipeline=dapo", "algorithm.dynamic_sampling.enabled=true"]
ONE_STEP = "trainer.steps=1"  # of two mini-batches
RUNNING = ("rae",)  # estimators that keep something from step to step
#: Losses and estimators of which a run has one of each: what one of them needs is nothing to the other.
PAIRED = {"clip_cov": "rloo", "gspo": "gigpo", "gmpo": "gdpo"}
#: Losses and estimators that need nothing else, in pairs too.
TOGETHER = PAIRED | dict(
    zip(
        (name for name in POLICY_LOSSES.names() if name not in NEEDS),
        (
            name
            for name in ADVANTAGES.names()
            if name not in ("gae", *PAIRED.values(), *NEEDS) and "old_logp" not in ADVANTAGES.required(name)
        ),
        strict=False,
    )
)
RECIPES = {
    **{
        f"advantage {name}": [f"algorithm.advantage.name={name}", *NEEDS.get(name, [])]
        for name in ADVANTAGES.names()
        if name not in ("gae", *TOGETHER.values())
    },
    **{
        f"loss {name}": [f"algorithm.loss.name={name}", "actor.mini_batch_size=2", *NEEDS.get(name, [])]
        for name in POLICY_LOSSES.names()
        if name not in (*TOGETHER, "opsm")  # that of DeepSeek-V3.2
    },
    **{
        f"loss {loss}, advantage {name}": [
            *(f"algorithm.loss.name={loss}", f"algorithm.advantage.name={name}", "actor.mini_batch_size=2"),
            *(*NEEDS.get(loss, []), *NEEDS.get(name, []), *(() if name in RUNNING else [ONE_STEP])),
        ]
        for loss, name in TOGETHER.items()
    },
    "HPT": [
        *(
            "data.experts={files: [FOLDER/experts.jsonl], share: 0.5}",
            "algorithm.loss={expert_coef: 1.0, expert_gate: 0.3}",
        ),
        *("rollout_correction.preset=decoupled_geo_rs_token_tis", "actor.mini_batch_size=2"),
    ],
    "experts with log-probs": [
        "data.experts={files: [FOLDER/experts.jsonl], in_group: true, logp_key: logp}",
        *("rollout_correction.preset=ppo_is_bypass", "algorithm.kl={use: loss, coef: 0.1}"),
    ],
    "replay": [
        "data.replay={share: 0.5, max_age: 3, priority: signal}",
        *("rollout_correction.preset=ppo_is_bypass", "algorithm.kl={use: loss, coef: 0.1}"),
    ],
    "loss of a user, prepared": ["algorithm.loss.name=tests.runtime.test_algorithms:on_the_likely"],
    "loss, estimator and reward of the documentation": [
        "algorithm.loss={name: 'FOLDER/my_losses.py:leash', pull: 0.05, aggregation: seq-mean-token-mean}",
        "algorithm.advantage={name: 'FOLDER/my_estimators.py:above_the_batch', share: 0.5}",
        "reward={name: 'FOLDER/my_rewards.py:nearness', kwargs: {width: 20}}",
    ],
    "DeepSeek-V3.2": [
        "algorithm.kl={use: loss, estimator: unbiased_k3, coef: 0.1}",
        *("algorithm.loss.name=opsm", "actor.mini_batch_size=2", "rollout_correction.preset=ppo_is_bypass"),
    ],
    "loss on observations": [*harness.GUESSING, "algorithm.loss.echo_coef=0.5", "actor.mini_batch_size=2"],
    "KL and filter of the documentation": [
        "algorithm.kl={use: loss, estimator: 'FOLDER/my_kl.py:capped', most: 0.5, coef: 0.1}",
        "algorithm.filter={name: 'FOLDER/my_filters.py:long_enough', shortest: 2}",
    ],
    "distillation": DISTILLATION,
    "distillation from the likeliest tokens, without rewards": [
        "algorithm.distillation={estimator: forward_kl_topk, topk: 5, log_prob_min_clamp: -8, coef: 1.0}",
        *("teacher.path=TEACHER", "actor.mini_batch_size=2", "algorithm.distillation.task_loss=false"),
    ],
    WHOLE: [
        "algorithm.distillation={estimator: jsd, topk: null, coef: 1.0, beta: 0.3}",
        *("teacher.path=TEACHER", "actor.mini_batch_size=2"),
    ],
    TWO_TEACHERS: [
        "algorithm.distillation={estimator: jsd, topk: null, coef: 1.0, beta: 0.3}",
        "teacher.models={one: {path: TEACHER, weight: 1}, two: {path: TEACHER, weight: 1}}",
        "actor.mini_batch_size=2",
    ],
    FULL: [
        "algorithm.kl={use: loss, estimator: full, coef: 0.5}",
        *("reference.path=TEACHER", "actor.mini_batch_size=2"),
    ],
    "distillation through the policy loss": [
        "algorithm.distillation={coef: 0.5, estimator: k1, through: policy, loss_max_clamp: 2.0}",
        *("teacher.path=TEACHER", "algorithm.loss.name=dppo_tv", "actor.mini_batch_size=2"),
        "rollout_correction.preset=decoupled_token_is",
    ],
    "resampled and shuffled": [
        *("algorithm.resampling={name: pow, power: 1.0}", "actor.mini_batch_size=2", "actor.shuffle=true"),
        *("actor.ppo_epochs=2", "actor.optim.warmup_ratio=0.5"),
        *("reward.skip_special_tokens=false", "reward.kwargs={whole: true}"),
    ],
    "optimal token baseline, corrected": [
        "algorithm.advantage={name: optimal_token_baseline, is_weighted: true}",
        "rollout_correction={preset: decoupled_token_is, is_batch_normalize: true, is_normalize_over: all}",
    ],
    "filters": ["rollout.sampling.max_new_tokens=12", "algorithm.filter.low=0.01", "algorithm.filter.truncated=true"],
    "filters and curriculum in dapo": [
        *("algorithm.filter.high=0.9", "algorithm.pipeline=dapo", "algorithm.loss.clip_high=0.28"),
        "data.curriculum.pools={hard: {up_to: 0.2, weight: 2}, easy: {}}",
    ],
    **{
        f"dapo, {name}": [*DAPO, f"algorithm.advantage.name={name}", *NEEDS.get(name, [])]
        for name in ("optimal_token_baseline", "reverse_kl", "remax")
    },
    "stage of a user": ["algorithm.pipeline=FOLDER/my_pipeline.py:build_graph"],
    "ppo, corrected": [
        *(
            "algorithm.pipeline=ppo",
            "algorithm.advantage={name: gae, lam: 0.9}",
            "algorithm.kl={use: reward, coef: 0.05}",
        ),
        *("algorithm.overlong.buffer_tokens=2", "rollout_correction.preset=decoupled_token_is"),
        *(
            "critic={mini_batch_size: 2, shuffle: true, aggregation: seq-mean-token-mean}",
            "algorithm.resampling.name=max_min",
        ),
    ],
    "dapo, distillation": [*DAPO, "algorithm.advantage.name=gdpo", *NEEDS["gdpo"], *DISTILLATION],
}


#: What each stage has read in the runs of this module, and the metrics of the recipes that have run.
READ: dict[str, set[str]] = defaultdict(set)
RAN: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(autouse=True)
def reads_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GuardedBatch._check

    def note(batch: GuardedBatch, name: str) -> None:
        check(batch, name)
        READ[batch._node.func_name].add(name)

    monkeypatch.setattr(GuardedBatch, "_check", note)


def likely(old_logp, advantages, mask, cfg, *, keys, all_sum):
    return {"chosen": mask & (old_logp > old_logp.mean())}


@POLICY_LOSSES.register(prepare=likely)
def on_the_likely(logp, old_logp, advantages, mask, cfg, *, chosen, offsets):
    """Looks at the mini-batch before it is cut, so there must be old log-probs even with one update per batch."""
    p = LossInputs.of(logp, old_logp, advantages, mask)
    return torch.where(chosen, -p.advantages * p.ratio, 0), p.metrics(~chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("algorithms")
    harness.write_recipe(here)
    (here / "parts.py").write_text(REWARD)
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    rows = [row | {"logp": [-0.1] * (len(row["response"]) + 1)} for row in sums]
    (here / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = {"leash": "losses", "above_the_batch": "estimators", "capped": "kl", "long_enough": "filters"}
    for name, file in ((name, f"my_{kind}.py") for name, kind in shown.items()):
        (here / file).write_text(code_with(f"def {name}(", "algorithms.md"))
    (here / "my_pipeline.py").write_text(code_with("def surprise", "architecture.md"))
    (here / "proposing.py").write_text(AGENT)
    (here / "my_models.py").write_text(code_with("def novelty", "architecture.md"))
    (here / "my_rewards.py").write_text(code_with("def nearness(", "tracking.md"))
    return here


def settings_of(folder: Path, *overrides: str) -> list[str]:
    settings = [*ONE_PROCESS, f"reward.name={folder / 'parts.py'}:parts", *overrides]
    return [text.replace("TEACHER", str(folder / "teacher")).replace("FOLDER", str(folder)) for text in settings]


def config_of(folder: Path, *overrides: str):
    return load_config(folder / "tiny.yaml", settings_of(folder, *overrides), components=COMPONENTS)


def train(folder: Path, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run inside this process."""
    from megarl.recipes import entry

    config = config_of(folder, *overrides)
    assert not [check for check in check_config(config).items if check.status == "fail"]
    run_dir.mkdir(exist_ok=True)
    entry.train(config, run_dir)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(("timing_s/", "perf/", "time"))}


@pytest.fixture(scope="module")
def teacher(folder: Path, alone_for_module: None) -> Path:
    train(folder, folder / "source", "trainer.export_hf=true", "trainer.steps=1", "model.init_seed=9")
    (folder / "source" / "hf").rename(folder / "teacher")
    return folder / "teacher"


@pytest.mark.parametrize(
    ("alphabet", "agrees"),
    [("01", True), ("012", True), ("0", False), ("10", False)],
    ids=["same", "more", "fewer", "swapped"],
)
def test_a_teacher_gives_every_token_of_the_policy_its_id(alphabet: str, agrees: bool) -> None:
    from megarl.data.tokenizer import character_tokenizer
    from megarl.runtime.role_models import check_same_tokens

    policy, teacher = character_tokenizer("01"), character_tokenizer(alphabet)
    if agrees:
        check_same_tokens(policy, teacher, "there")
    else:
        with pytest.raises(ConfigError, match=r"teacher\.path: .*different vocabularies.*'1' is 5 and (4|None)"):
            check_same_tokens(policy, teacher, "there")


@pytest.mark.parametrize(("rows", "fits"), [(28, True), (16, False)])
def test_a_teacher_may_pad_its_embedding_further(folder: Path, teacher: Path, tmp_path: Path, rows, fits) -> None:
    """Twenty rows, cut or padded with zeros, beside the same tokenizer."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.shape[0] == config["vocab_size"]:
            tensors[name] = torch.cat([tensor, tensor.new_zeros(8, *tensor.shape[1:])])[:rows].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    settings = ["algorithm.advantage.name=reverse_kl", f"teacher.path={other}"]
    if fits:
        assert [line["step"] for line in train(folder, tmp_path / "run", *settings)] == [1, 2]
        return
    failed = [check for check in check_config(config_of(folder, *settings)).items if check.status == "fail"]
    assert [check.key for check in failed] == ["teacher.path"]
    assert "20 tokens, and up to 1024 more" in str(failed[0].problem())
    from megarl.recipes import entry

    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"teacher\.path: the policy can sample tokens"):
        entry.train(config_of(folder, *settings), tmp_path / "run")


@pytest.fixture(scope="module")
def alone_for_module() -> Iterator[None]:
    """One process group of this process, which all runs of this module share; what scores is forked from it."""
    from tests.dist import single_process

    with forked_scorers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.runtime.setup.init_processes", lambda *_: single_process())
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_a_few_steps(name: str, folder: Path, teacher: Path, tmp_path: Path) -> None:
    lines = train(folder, tmp_path / "run", *RECIPES[name])
    RAN[name] = lines
    assert [line["step"] for line in lines] == ([1] if ONE_STEP in RECIPES[name] else [1, 2])
    for line in lines:
        for key in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm"):
            assert math.isfinite(line[f"actor/{key}"]), key
        for key in ("min", "mean", "max"):
            assert line[f"actor/ratio_{key}"] > 0
    if "filter" not in name:
        assert max(line["actor/grad_norm"] for line in lines) > 0
    if name.split()[-1] in ADVANTAGES.names() and "old_logp" in ADVANTAGES.required(name.split()[-1]):
        assert lines[0]["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)
    if "distillation" in name:
        assert lines[0]["actor/distillation_loss"] != 0
    if name == WHOLE:
        other = train(folder, tmp_path / "top", *RECIPES[name], "algorithm.distillation.topk=20")  # all tokens
        for a, b in zip(lines, other, strict=True):
            assert a["actor/distillation_loss"] == pytest.approx(b["actor/distillation_loss"], rel=1e-5)
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
    if name == FULL:  # the same as distillation from the reference
        same = ["algorithm.distillation={estimator: reverse_kl, topk: null, coef: 0.5}", "teacher.path=TEACHER"]
        other = train(folder, tmp_path / "teacher", *same, "actor.mini_batch_size=2")
        for a, b in zip(lines, other, strict=True):
            assert a["actor/kl_loss"] == pytest.approx(b["actor/distillation_loss"], rel=1e-6)
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-6)
    if name == TWO_TEACHERS:  # of which each prompt has one, at its own place among the states
        assert 0 < sum(line["teacher/one"] for line in lines) < 2
        other = RAN.get(WHOLE) or train(folder, tmp_path / "one", *RECIPES[WHOLE])
        for a, b in zip(lines, other, strict=True):
            assert a["actor/distillation_loss"] == pytest.approx(b["actor/distillation_loss"], rel=1e-5)
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
    if name == "loss on observations":
        assert all(line["actor/echo_loss"] > 1 for line in lines)  # of a fresh model with 20 tokens
    if name == "stage of a user":
        assert 0.01 <= lines[0]["price/per_sample"] <= 0.04
        assert lines[0]["price/surprise"] == pytest.approx(math.log(20), rel=0.1)  # of a fresh model with 20 tokens
    if name.endswith("remax"):
        assert 0 <= lines[0]["critic/greedy_score/mean"] <= 2
    if name.startswith("KL and filter"):
        assert 0 < lines[-1]["filter/kept"] <= 1
        assert 0 < lines[-1]["actor/kl_loss"] <= 0.5
    check_sources(name, lines)
    if name == "filters":
        assert 0 <= lines[0]["filter/kept"] < 1


def check_sources(name: str, lines: list[dict[str, Any]]) -> None:
    """Metrics of experts and of replayed samples."""
    if name in ("loss luffy", "HPT", "experts with log-probs"):
        assert all(line["experts/samples"] > 0 and line["experts/score/mean"] > 1 for line in lines)
        assert all(0 < line["experts/token_share"] < 1 <= line["experts/response_length/mean"] for line in lines)
        assert ("experts/ratio_max" in lines[0]) == (name == "experts with log-probs")
        assert all(line["critic/score/max"] < 1 for line in lines), "the policy's own samples only"
    if name == "loss luffy":
        assert lines[0]["actor/expert_prob"] == pytest.approx(1 / 20, rel=0.3)  # of a fresh model with 20 tokens
    if name == "replay":
        assert [line["replay/groups"] for line in lines] == [0, 4]
        assert lines[1]["replay/age"] == 1
        assert lines[0]["replay/token_share"] == 0 < lines[1]["replay/token_share"] < 1
        assert lines[1]["replay/ratio_max"] == lines[1]["actor/ratio_max"] != 1, "fresh samples have a ratio of 1"
        assert lines[1]["rollout_corr/staleness/1"] == pytest.approx(lines[1]["replay/token_share"])
        assert 0 < lines[1]["replay/score/mean"] < 1
        assert lines[0]["actor/ratio_max"] == pytest.approx(1, abs=1e-5) != lines[1]["actor/ratio_max"]
    if name == "HPT":
        assert all(line["experts/sft_groups"] > 0 for line in lines)
        assert lines[0]["actor/expert_loss"] == pytest.approx(math.log(20), rel=0.1)


@pytest.mark.usefixtures("alone_for_module")
@pytest.mark.parametrize("kind", ["models", "policies"])
def test_a_run_with_further_models_or_policies_resumes_with_the_same_numbers(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    settings = {"models": FURTHER, "policies": [*POLICIES, *OWN_WEIGHTS, FEW]}[kind]
    lines = train(folder, tmp_path / "whole", *settings, "trainer.save_every=1")
    half = f"trainer.resume={tmp_path / 'whole' / 'checkpoints' / 'step_1'}"
    again = train(folder, tmp_path / "half", *settings, half, "trainer.export_hf=true")
    assert [numbers(line) for line in again] == [numbers(lines[1])]
    if kind == "models":  # it begins as the policy
        assert lines[0]["imitator/loss"] == pytest.approx(math.log(20), rel=0.1)  # of a fresh model with 20 tokens
        assert lines[0]["imitator/loss"] == pytest.approx(lines[0]["imitator/surprise"])
        assert (tmp_path / "half" / "hf_imitator" / "model.safetensors").exists()
        return
    assert 0 < lines[0]["proposer/critic/baseline"] < lines[1]["proposer/critic/baseline"] < 1
    assert lines[0]["env/samples"] == 3
    # Without the solver's turns the shared weights are updated as the proposer's are alone, but for rounding: their
    # micro-batches have other rows, too.
    shared = train(folder, tmp_path / "shared", *POLICIES, FEW, "policies.solver.train=false", "actor.optim.lr=0.002")
    for mine, theirs in zip(lines, shared, strict=True):
        assert mine["proposer/actor/entropy"] == pytest.approx(theirs["actor/entropy"], rel=1e-6)
    assert lines[0]["proposer/actor/grad_norm"] == pytest.approx(shared[0]["actor/grad_norm"], rel=1e-5)
    assert 0 < lines[0]["actor/grad_norm"] != pytest.approx(shared[0]["actor/grad_norm"], rel=1e-2)
    # old log-probs of rows of a model are at its own temperature, as those of the rollout
    cool = "policies.proposer.sampling={temperature: 0.1, top_k: 15}"
    (line,) = train(folder, tmp_path / "cool", *settings, cool, "trainer.steps=1", "actor.ppo_epochs=2")
    assert line["rollout_corr/k3_kl"] == pytest.approx(0, abs=1e-6)
    assert line["proposer/actor/entropy"] < 0.9 * lines[0]["proposer/actor/entropy"]


#: The game of `AGENT` as a class, in which the rewards are those of the agent or of a reward function.
CLASS = """
from megarl.envs import Ask, EpisodeRewards, SeveralPolicies

class Game(SeveralPolicies):
    def begin(self, row, seed):
        self.said = []
        return Ask("proposer", row["prompt"])

    def reply(self, policy, action):
        self.said.append(action.text)
        if len(self.said) < 3:
            return Ask("solver", self.said[0][:2] + "=", fresh=True)
        digits = [sum(c.isdigit() for c in text) / 4 for text in self.said[1:]]
        return EpisodeRewards({"proposer": 1 - sum(digits) / 2, "solver": digits})

class Scored(Game):
    scores = False
"""
FUNCTION = """
def pay(samples):
    digits = [sum(c.isdigit() for c in s["response"]) / 4 for s in samples]
    return [number if s["policy"] == "solver" else -1.0 for number, s in zip(digits, samples)]
"""


@pytest.mark.campaign("agents")
@pytest.mark.usefixtures("alone_for_module")
def test_a_game_of_a_class_is_the_game_of_an_agent(folder: Path, tmp_path: Path) -> None:
    (folder / "game.py").write_text(CLASS)
    (folder / "paying.py").write_text(FUNCTION)
    agent = train(folder, tmp_path / "agent", *POLICIES, *OWN_WEIGHTS)
    game = train(folder, tmp_path / "game", *POLICIES, "env=!replace {name: FOLDER/game.py:Game}", *OWN_WEIGHTS)
    own = ("env/calls", "env/limited", "env/untrained_calls", "env/timeouts", "env/undelivered", "env/branches")
    kept = [{k: v for k, v in numbers(line).items() if not k.startswith(own)} for line in (*agent, *game)]
    # The solver's turns of the agent are decoded side by side, in larger batches: the last bit of a log-prob differs.
    gaps = [{k: line.pop(k) for k in list(line) if k.startswith("rollout_corr/")} for line in kept]
    assert kept[:2] == kept[2:]
    assert_near(dict(enumerate(gaps[:2])), dict(enumerate(gaps[2:])))
    scored = ["env=!replace {name: FOLDER/game.py:Scored}", "reward=!replace {name: FOLDER/paying.py:pay}"]
    (first, _) = train(folder, tmp_path / "scored", *POLICIES, *scored, *OWN_WEIGHTS)
    assert first["solver/critic/score/mean"] == game[0]["solver/critic/score/mean"] > 0
    assert first["proposer/critic/score/mean"] == -1
    own = ["reward=!replace {name: numeric}", "policies.solver.reward={name: FOLDER/paying.py:pay}"]
    (second, _) = train(folder, tmp_path / "own", *POLICIES, scored[0], *own, *OWN_WEIGHTS)
    assert second["solver/critic/score/mean"] == first["solver/critic/score/mean"]
    assert second["proposer/critic/score/mean"] == 0


@pytest.mark.procs
@pytest.mark.campaign("agents")
def test_mini_batches_and_a_reference_of_policies_are_those_of_any_layout(folder: Path, tmp_path: Path) -> None:
    more = ["models.proposer.mini_batch_size=2", "models.proposer.shuffle=true", "actor.ppo_epochs=2"]
    settings = settings_of(folder, *POLICIES, *OWN_WEIGHTS, *more, "algorithm.kl={use: loss, coef: 0.1}")
    whole, parts = (
        harness.train(folder / "tiny.yaml", tmp_path / str(ranks), *settings, f"cluster.nproc={ranks}")
        for ranks in (1, 2)
    )
    assert_near(whole, of_training(parts))
    assert [whole[step]["proposer/actor/kl_loss"] > 0 for step in (1, 2)] == [True, True]
    teams = {"solver": (["actor", "rollout", "reference"], 1), "proposer": (["proposer"], 1)}
    apart = harness.train(folder / "tiny.yaml", tmp_path / "apart", *settings, *placed(teams))
    assert of_training(apart) == whole


#: The proposer is paid for signs and the solver for digits, which is the opposite.
PAID = AGENT.replace('"proposer": 1 - sum(digits) / 2', '"proposer": 1 - sum(c.isdigit() for c in said) / 4')


@pytest.mark.campaign("agents")
@pytest.mark.usefixtures("alone_for_module")
@pytest.mark.parametrize("weights", ["own", "shared"])
@pytest.mark.parametrize("frozen", ["", "proposer", "solver"])
def test_both_policies_learn_and_a_frozen_one_does_not(weights: str, frozen: str, folder: Path, tmp_path: Path) -> None:
    (folder / "proposing.py").write_text(PAID)
    settings = [*POLICIES, *(OWN_WEIGHTS if weights == "own" else ()), "trainer.steps=30", "actor.optim.lr=0.004"]
    settings += [f"policies.{frozen}.train=false"] if frozen else []
    lines = train(folder, tmp_path / "run", *settings, "rollout.sampling.n=8")
    for policy in ("proposer", "solver"):
        scores = [line[f"{policy}/critic/score/mean"] for line in lines]
        gain = sum(scores[-5:]) / 5 - sum(scores[:5]) / 5
        print(weights, frozen or "none", policy, round(gain, 3))
        if policy != frozen:
            assert gain > 0.15
        elif weights == "own":
            assert abs(gain) < 0.1


@pytest.mark.procs
def test_the_teachers_likeliest_tokens_may_come_from_a_team_of_its_own(folder, teacher, tmp_path):
    """There two teachers share out the prompts, which say what the one teacher here says."""
    settings = RECIPES["distillation from the likeliest tokens, without rewards"]
    (first, second) = train(folder, tmp_path / "together", *settings)
    teams = {"train": (["actor", "rollout"], 1), "school": (["teacher"], 1)}
    two = ["teacher.path=null", "teacher.models={one: {path: TEACHER, weight: 1}, two: {path: TEACHER, weight: 2}}"]
    given = settings_of(folder, *settings, *two, *placed(teams))
    apart = of_training(harness.train(folder / "tiny.yaml", tmp_path / "apart", *given))
    for step in apart.values():
        assert step.pop("teacher/one") + step.pop("teacher/two") == pytest.approx(1)
    together = {step: {name: line[name] for name in apart[step]} for step, line in enumerate((first, second), 1)}
    assert "actor/distillation_loss" in together[1]
    assert_near(together, apart)


def test_every_stage_ran_and_needs_what_it_says_it_reads() -> None:
    """That a stage reads nothing else is an error of every run."""
    if set(RECIPES) - set(RAN):
        pytest.skip("follows from all recipes of this module")
    modules = [
        importlib.import_module(f"{stages.__name__}.{info.name}") for info in pkgutil.iter_modules(stages.__path__)
    ]
    shipped = {
        f"{m.__name__}:{f.__name__}": contract_of(f) for m in modules for f in vars(m).values() if is_stage(f, m)
    }
    for name in ("rule_rewards", "model_score", "total_reward"):  # tests/runtime/test_reward_model.py
        del shipped[f"megarl.runtime.stages.reward:{name}"]
    given = ("preference:dpo_train", "preference:reward_model_train", "kto:mismatched_ref_logp", "kto:kto_train")
    for name in given:  # of runs on given responses, tests/runtime/test_preferences.py
        del shipped[f"megarl.runtime.stages.{name}"]
    del shipped["megarl.runtime.stages.replay:replay"]  # keeps all fields, so it reads past the guard that notes reads
    assert {name for name in shipped if name not in READ} == set()
    idle = {name: {*contract.reads, *contract.consumes} - READ[name] for name, contract in shipped.items()}
    assert {name: fields for name, fields in idle.items() if fields} == {}


def is_stage(value: Any, module: types.ModuleType) -> bool:
    return hasattr(value, "__stage__") and value.__module__ == module.__name__


_AGENTS = pytest.mark.campaign("agents")
_GENERATES = {"draw": (["rollout"], 1)}


@pytest.mark.procs
@pytest.mark.parametrize(
    ("teams", "layout"),
    [
        ({"solver": (["actor", "rollout"], 1), "proposer": (["proposer"], 1)}, ()),
        pytest.param({**_GENERATES, "solver": (["actor"], 1), "proposer": (["proposer"], 1)}, (), marks=_AGENTS),
        pytest.param({**_GENERATES, "both": (["actor", "proposer"], 1)}, (), marks=_AGENTS),
        pytest.param({"solver": (["actor", "rollout"], 1), "proposer": (["proposer"], 2)}, ("dp",), marks=_AGENTS),
        pytest.param(
            {"solver": (["actor", "rollout"], 1), "proposer": (["proposer"], 2)},
            ("models.proposer.parallel.tp=2",),
            marks=_AGENTS,
        ),
        pytest.param({"solver": (["actor", "rollout"], 2), "proposer": (["proposer"], 1)}, ("dp",), marks=_AGENTS),
    ],
)
def test_a_policy_in_a_team_of_its_own_is_the_same_run_and_goes_on(
    teams: dict[str, tuple[list[str], int]], layout: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    settings = settings_of(folder, *POLICIES, *OWN_WEIGHTS, FEW, "trainer.save_every=1")
    together = harness.train(folder / "tiny.yaml", tmp_path / "together", *settings)
    more = [*placed(teams), *(setting for setting in layout if "=" in setting)]

    def apart(*last: str) -> dict[int, dict[str, float]]:
        return of_training(harness.train(folder / "tiny.yaml", tmp_path / "apart", *settings, *more, *last))

    half, whole = apart("trainer.steps=1"), apart()
    assert half[1] == whole[1]
    if layout:
        assert_near(together, whole)
    else:
        assert whole == together


@pytest.mark.procs
@_AGENTS
@pytest.mark.parametrize("lag", [1, 2])
def test_policies_generate_with_the_weights_of_one_earlier_step(lag: int, folder: Path, tmp_path: Path) -> None:
    more = [f"async.max_staleness={lag}", "rollout_correction.preset=decoupled_token_is"]
    settings = settings_of(folder, *POLICIES, *OWN_WEIGHTS, *more, "algorithm.kl.use=none", "trainer.steps=4")
    one, own = (
        {**_GENERATES, **teams}
        for teams in ({"both": (["actor", "proposer"], 1)}, {"solver": (["actor"], 1), "proposer": (["proposer"], 1)})
    )

    whole, apart = (
        of_training(harness.train(folder / "tiny.yaml", tmp_path / name, *settings, *placed(teams)))
        for name, teams in (("one", one), ("own", own))
    )
    assert whole == apart, "weights that wait are those of every model"
    gaps = [whole[step]["rollout_corr/k3_kl"] for step in whole]
    assert gaps[0] == pytest.approx(0, abs=1e-6)
    assert min(gaps[lag:]) > 1e-5
    assert whole[4][f"rollout_corr/staleness/{lag}"] == 1
