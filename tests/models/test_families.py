"""Every architecture against transformers, in configurations drawn from what its class reads."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings

from megarl.architectures import ARCHITECTURES, olmo3
from megarl.architectures.adapters import is_adapter
from megarl.artifacts.facts import facts_from_config, model_facts
from megarl.artifacts.layout import layout_problems
from megarl.checks.weights import check_weights
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.data.tokenizer import character_tokenizer
from megarl.models.packing import pack_stream
from megarl.models.weight_table import as_index
from megarl.models.weights import export_weights
from megarl.models.weights.adapters import adapter_tensors
from megarl.models.weights.files import CheckpointReader
from megarl.models.weights.fill import local_shards
from megarl.rollout.engine import Request
from megarl.system.errors import ConfigError
from tests.dist import run_distributed, single_process, world
from tests.models import families
from tests.models.families import of_transformers
from tests.models.test_older_readers import has_class_in_transformers_4, read_by_transformers_4
from tests.models.tiny import build_tiny, tiny_dict, two_layers
from tests.rollout.cases import engine, sampled
from tests.runtime import harness
from tests.training import cases, test_layouts

LENGTHS = [20, 7, 1, 29]
LOGPROBS = 1e-5  # float32; log-probs have a size of about 5
PROMPTS = 20
LEAST = 30  # equal configurations of each architecture in the campaign
SPLIT = 10  # configurations of each architecture that are split over processes
#: The only values with which both versions make the same model: 4 has gpt-oss's as constants, and gives OLMo 3's layers
#: with a window the theta of the others, and refuses scaled rotary positions of OLMo 2.
OLDER_VALUES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "olmo2": {"rope_scaling": None, "rope_parameters": None},
    "olmo3": {"rope_theta": olmo3.THETA},
}
#: Refusals of what transformers runs: of odd widths for yarn, it runs 3 numbers only, where one factor fits both pairs.
NOT_SUPPORTED = ("is not supported", "makes an even number of")


@pytest.fixture(autouse=True, scope="module")
def _parallel():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    single_process()


def samples(vocab: int) -> list[torch.Tensor]:
    return [families.token_ids(length, vocab, seed) for seed, length in enumerate(LENGTHS)]


def packed_logits(model: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence, all in one packed stream."""
    lengths = [len(part) for part in parts]
    stream = pack_stream(lengths)
    hidden = model(stream.input_ids(torch.cat(parts)), stream.position_ids, None, packed_seq_params=stream.params)
    return list(model.logits(hidden[:, 0]).split(lengths))


def log_probs(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.float().log_softmax(-1) for part in logits]


def loss(logits: list[torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """Every position predicts a token, the last one the first."""
    return sum(F.cross_entropy(out, part.roll(-1), reduction="sum") for out, part in zip(logits, parts, strict=True))


def tolerance(oracle: torch.nn.Module, parts: list[torch.Tensor]) -> float:
    """How far log-probs may differ. Some drawn models double an error in the last place more often than others: of a
    Qwen3.5 with experts, transformers' float32 was off by 3.8 times this change, from its own forward in float64."""
    return max(LOGPROBS, 5 * families.last_place(oracle, parts))


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], what: str, tolerance: float) -> None:
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert worst < tolerance, f"{what}: log-probs differ by {worst:.2g}"


def gradients_of(model: torch.nn.Module, folder: Path) -> CheckpointReader:
    """The gradients of a model of transformers, under the names of checkpoints."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder)
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return CheckpointReader(folder)


def check_gradients(model: Any, theirs: CheckpointReader, bound: float) -> None:
    for shard, parameter in local_shards([model]):
        for piece in shard.pieces if parameter.requires_grad else ():
            ours, wanted = parameter.grad[as_index(piece.target_region)], theirs.read(piece.source, piece.source_region)
            size = max(theirs.read(piece.source).abs().max().item(), 0.1)
            worst = (ours - wanted).abs().max().item()
            assert worst < 10 * bound * size, f"gradient of {piece.source}: {worst:.2g} of {size:.2g}"


def check_greedy(model: Any, oracle: torch.nn.Module, vocab: int, bound: float) -> None:
    """Each generated token is the most likely one of transformers, for what was generated before it."""
    lengths = [1 + number % 5 * 4 for number in range(PROMPTS)]
    prompts = [families.token_ids(length, vocab, 100 + number) for number, length in enumerate(lengths)]
    requests = [Request(prompt.tolist(), [number]) for number, prompt in enumerate(prompts)]
    results = engine([model]).generate(requests, sampled(temperature=0.0, max_new_tokens=8), [])
    for length in sorted(set(lengths)):
        rows = [
            (prompt.tolist(), group[0]) for prompt, group in zip(prompts, results, strict=True) if len(prompt) == length
        ]
        ids = torch.tensor([prompt + completion.token_ids for prompt, completion in rows])
        with torch.no_grad():
            out = oracle(input_ids=ids, use_cache=False, output_router_logits=False).logits[:, length - 1 : -1]
        wanted = out.float().log_softmax(-1)
        drawn = ids[:, length:]
        theirs = wanted.gather(-1, drawn[..., None])[..., 0]
        # Two tokens may be equally likely up to rounding.
        assert (wanted.max(-1).values - theirs).max() < bound, "greedy tokens differ"
        close([torch.tensor([completion.logprobs for _, completion in rows])], [theirs], "generated tokens", bound)


def check_export(model: Any, folder: Path, oracle: torch.nn.Module, parts: list[torch.Tensor], bound: float) -> None:
    export_weights([model], folder, model.hf_config, character_tokenizer("0123456789+="), world=world())
    facts = model_facts(ModelConfig(path=str(folder)))
    check_weights(folder, facts)
    source, written = CheckpointReader(folder.parent), CheckpointReader(folder)
    assert set(source.names()) == set(written.names())
    for name in source.names():
        assert torch.equal(source.read(name), written.read(name)), f"{name} is another tensor in the export"
    again = families.read(folder)
    with torch.no_grad():
        close(log_probs(of_transformers(again, parts)), log_probs(of_transformers(oracle, parts)), "export", bound)


def check_adapters(folder: Path, facts: Any, parts: list[torch.Tensor], bound: float) -> None:
    """The merged export is the model with adapters, whose gradients are those of the merged weights by the chain
    rule."""
    from megarl.models.lora import local_adapters

    model = families.with_adapters(folder, facts)
    logits = packed_logits(model, parts)
    loss(logits, parts).backward()
    export_weights([model], folder / "merged", model.hf_config, world=world())
    oracle = families.read(folder / "merged")
    bound = max(bound, tolerance(oracle, parts))
    theirs = of_transformers(oracle, parts)
    close(log_probs(logits), log_probs(theirs), "adapters", 3 * bound)  # sums in another order
    loss(theirs, parts).backward()
    wanted = gradients_of(oracle, folder / "merged gradients")
    lora = model.config.lora
    values = {name: torch.zeros(shape) for name, shape in adapter_tensors(model.hf_config, lora).items()}
    grads = {name: torch.zeros_like(value) for name, value in values.items()}
    for shard, parameter in local_adapters([model], lora):
        for piece in shard.pieces:
            values[piece.source][as_index(piece.source_region)] = parameter.detach()[as_index(piece.target_region)]
            grads[piece.source][as_index(piece.source_region)] = parameter.grad[as_index(piece.target_region)]
    for stem in {name.rpartition(".lora_")[0] for name in values}:
        a, b = (values[f"{stem}.lora_{side}.weight"] for side in "AB")
        block, _, expert = stem.partition(".experts.")
        number, _, projection = expert.partition(".")
        if f"{stem}.weight" not in wanted:  # experts in one tensor, in x out
            whole = wanted.read(f"{block}.experts.{projection}")[int(number)].T
        else:
            whole = wanted.read(f"{stem}.weight")
        for side, expected in (("A", b.T @ whole * lora.scale), ("B", whole @ a.T * lora.scale)):
            worst = (grads[f"{stem}.lora_{side}.weight"] - expected).abs().max().item()
            size = max(expected.abs().max().item(), 0.1)
            assert worst < 10 * bound * size, f"gradient of {stem}, adapter {side}: {worst:.2g} of {size:.2g}"
    check_update(model, folder, parts)


def check_update(model: Any, folder: Path, parts: list[torch.Tensor]) -> None:
    """After a step of the adapters along their gradients, the merged export is the model with adapters again."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert is_adapter(name), f"{name} would be trained"
            parameter.data -= 0.05 * parameter.grad / parameter.grad.abs().max().clamp(min=1e-9)
    with torch.no_grad():
        logits = packed_logits(model, parts)
        export_weights([model], folder / "updated", model.hf_config, world=world())
        oracle = families.read(folder / "updated")
        bound = tolerance(oracle, parts)
        close(log_probs(logits), log_probs(of_transformers(oracle, parts)), "updated adapters", 3 * bound)


def check(raw: dict[str, Any], folder: Path, *, adapters: bool = True) -> str:
    """`equal`, or `refused` before the start; anything else fails."""
    made = families.reference(raw, folder)
    refusal = None
    try:
        facts = model_facts(ModelConfig(path=str(folder)))
        if made is not None:
            check_weights(folder, facts)
    except ConfigError as error:
        refusal = str(error)
    if refusal is not None:
        assert made is None or any(re.search(reason, refusal) for reason in NOT_SUPPORTED), refusal
        return "refused"
    assert made is not None, "transformers does not run this, and the checks accept it"
    oracle, _ = made
    parts = samples(raw["vocab_size"])
    bound = tolerance(oracle, parts)
    (model,) = build_tiny(folder)
    logits, theirs = packed_logits(model, parts), of_transformers(oracle, parts)
    close(log_probs(logits), log_probs(theirs), "packed", bound)
    with torch.no_grad():
        close(log_probs([packed_logits(model, [part])[0] for part in parts]), log_probs(theirs), "alone", bound)
    loss(logits, parts).backward()
    loss(theirs, parts).backward()
    check_gradients(model, gradients_of(oracle, folder / "gradients"), bound)
    check_greedy(model, oracle, raw["vocab_size"], bound)
    check_export(model, folder / "export", oracle, parts, bound)
    if adapters:
        check_adapters(folder, facts, parts, bound)
    return "equal"


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=sorted(ARCHITECTURES))
def test_a_small_model_equals_transformers(number, tmp_path):
    name = sorted(ARCHITECTURES)[number]
    raw = tiny_dict(name, tie_word_embeddings=number % 2 == 0, **two_layers(name))
    assert check(raw, tmp_path, adapters=False) == "equal"


def read_alike(raw: dict[str, Any]) -> bool:
    """Whether transformers 4 makes the model of a config.json that transformers 5 makes."""
    width = raw.get("head_dim", 0) * raw["num_attention_heads"]
    if raw["model_type"] == "qwen2_moe" and width not in (0, raw["hidden_size"]):
        return False  # version 4 refuses it
    if raw.get("topk_group", 1) < raw.get("n_group", 1):
        return False  # version 4 gives experts of left-out groups a score of 0, which is above negative ones of others
    only = OLDER_VALUES.get(raw["model_type"], {})
    return all(raw.get(key, value) == value for key, value in only.items())


@pytest.mark.campaign("families")
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_drawn_configurations_are_equal_or_refused(model_type, tmp_path, capsys):
    results: collections.Counter[str] = collections.Counter()
    seen: list[str] = []

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # configurations are small as they are drawn
        suppress_health_check=list(HealthCheck),
    )
    @given(raw=families.fitting(model_type))
    def each(raw: dict[str, Any]) -> None:
        if results["equal"] >= LEAST:
            return
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        seen.append(json.dumps(raw))
        results[check(raw, folder)] += 1

    each()
    places = [tmp_path / str(number) / "export" for number, raw in enumerate(seen) if read_alike(json.loads(raw))]
    exports = [folder for folder in places if folder.exists()]
    older = has_class_in_transformers_4(model_type)
    if older:
        differences = read_by_transformers_4(exports)
        for folder, worst in differences.items():
            assert worst < LOGPROBS, (worst, (Path(folder).parent / "config.json").read_text())
    with capsys.disabled():
        print(f"\n{model_type}: {dict(results)}, read by transformers 4: {len(exports) if older else 'no class'}")
    assert results["equal"] >= LEAST


# -- layouts, in real processes ----------------------------------------------------------------------------------------

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "cp2": {"cp": 2},
}


def refusal(raw: dict[str, Any], sizes: dict[str, int]) -> str | None:
    """Why the checks before the start refuse to split the model like this; None: they accept it."""
    facts = facts_from_config(raw, "config.json")
    problems = layout_problems("actor.parallel", ParallelConfig(**sizes), facts)
    return str(problems[0]).splitlines()[0] if problems else None


def _reference(raws: dict[str, dict[str, Any]], layouts: list) -> dict:
    cases.MODELS.update(raws)
    return test_layouts._reference(layouts)


def _compare(raws: dict[str, dict[str, Any]], layouts: list, reference: dict) -> list:
    cases.MODELS.update(raws)
    return test_layouts._all_cases(layouts, reference)


def configurations(model_type: str, count: int) -> dict[str, dict[str, Any]]:
    """Drawn configurations that are supported, by a name."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=4 * count, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(raw=families.fitting(model_type))
    def each(raw: dict[str, Any]) -> None:
        with contextlib.suppress(ConfigError):
            facts_from_config(raw, "config.json")
            found.append(raw)

    each()
    return {f"{model_type} {number}": raw for number, raw in enumerate(found[:count])}


@pytest.mark.campaign("families")
@pytest.mark.procs
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_two_processes_equal_one(model_type, capsys):
    """Log-probs, loss, norm of all gradients, and weights after two steps; tolerances as in `test_layouts`."""
    raws = configurations(model_type, SPLIT)
    layouts = [(name, sizes, {}) for name, raw in raws.items() for sizes in LAYOUTS.values() if not refusal(raw, sizes)]
    (reference,) = run_distributed(_reference, 1, 600, raws, layouts)
    ranks = run_distributed(_compare, 2, 900, raws, layouts, reference)
    for number, case in enumerate(layouts):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        assert max(worst["logp"], worst["entropy"]) < LOGPROBS, (case, worst, raws[case[0]])
        assert max(value for key, value in worst.items() if key.startswith("step")) < 5e-6, (case, worst)
        assert worst["weights"] < 5e-6, (case, worst, raws[case[0]])
    with capsys.disabled():
        print(f"\n{model_type}: {len(raws)} configurations")
        for name, sizes in LAYOUTS.items():
            reasons = [reason for raw in raws.values() if (reason := refusal(raw, sizes))]
            print(f"  {name}: {len(raws) - len(reasons)} equal, {len(reasons)} refused", *reasons[:1])


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.campaign("families")
@pytest.mark.procs
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_killed_run_goes_on_to_the_same_numbers(model_type, tmp_path):
    recipe = harness.write_recipe(tmp_path, tiny_dict(model_type, num_hidden_layers=2))
    short = ("trainer.steps=3", "cluster.nproc=1", "sft.steps=1")
    whole = harness.train(recipe, tmp_path / "whole", *short)
    assert whole[3]["actor/grad_norm"] > 0
    with harness.held_at(recipe, tmp_path / "killed" / "checkpoints" / "step_2"):
        process = harness.start(recipe, tmp_path / "killed", *short)
        harness.wait_for((tmp_path / "killed" / "checkpoints" / "step_2").exists, process)
        harness.wait_for(lambda: harness.workers(tmp_path / "killed"), process)
        harness.kill(harness.workers(tmp_path / "killed")[0])
    harness.finish(process)
    assert process.returncode == 1
    assert harness.train(recipe, tmp_path / "killed", *short) == whole
