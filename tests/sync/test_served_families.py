"""Real SGLang servers compute drawn models as transformers does, or the checks refuse the models before a start."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import facts_from_config
from megarl.checks.recipe import check_config
from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.models.layers.attention.plain import Attention
from megarl.models.rope import Rope, rotate
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.probe import greedy_probe
from megarl.rollout.sglang.server_places import NAME
from megarl.system.compat.sglang import LOADERS, STAND_INS
from megarl.system.errors import ConfigError
from tests.config.conftest import config_of, write  # noqa: F401
from tests.models import families
from tests.rollout.forked import run_program
from tests.sync.test_server_classes import PROGRAM
from tests.sync.test_sglang import KEY, MISSING, serving

pytestmark = [
    *(pytest.mark.procs, pytest.mark.servers, pytest.mark.campaign("servers"), pytest.mark.timeout(1200)),
    pytest.mark.skipif(bool(MISSING), reason=f"no SGLang to test with: {MISSING}"),
]
SERVED, READ = 6, 20  # models of each architecture
CLOSE = 1e-4  # float32 with other kernels; log-probs have a size of about 5
PROMPT, NEW = 40, 8  # tokens; the drawn windows are shorter, and longrope's shortest limit is longer
#: On a CPU the server pads these widths to multiples of 32.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def fit_rope(raw: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Leave out scaled positions of other kinds, and settings of yarn that only transformers reads."""
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type") not in kinds:
        raw.pop("rope_scaling", None)
    for key in ("attention_factor", "truncate"):
        scaling.pop(key, None)
    if bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        scaling |= {"mscale": 0.7, "mscale_all_dim": 1.0}


def drawn(model_type: str, count: int) -> list[dict[str, Any]]:
    """Configurations that megarl trains, with widths that CPU servers compute."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(raw=families.fitting(model_type))
    def each(raw: dict[str, Any]) -> None:
        raw |= {key: 32 * (raw[key] // 8) for key in WIDTHS if key in raw} | {"max_position_embeddings": 128}
        served = ARCHITECTURES[model_type].served
        if not served.head_dim:
            raw.pop("head_dim", None)
        if served.rope_theta is not None:
            raw["rope_theta"] = served.rope_theta
        if not served.tied:
            raw["tie_word_embeddings"] = False
        if served.rope_types is not None:
            fit_rope(raw, served.rope_types)
        try:
            facts_from_config(raw, "config.json")
        except ConfigError:
            return
        found.append(raw)

    each()
    return found


def refusal(raw: dict[str, Any], config_of: Any, *overrides: str) -> str | None:  # noqa: F811
    """Why the checks refuse to serve the model; None: they accept it."""
    limits = (f"data.max_prompt_tokens={PROMPT}", f"rollout.sampling.max_new_tokens={NEW}")
    model = ("rollout.engine=sglang", "model.hf_config=null", f"model.hf_config={json.dumps(raw)}")
    config = config_of(*model, *limits, *overrides)
    failed = [check for check in check_config(config).items if check.status == "fail" and check.name == NAME]
    return failed[0].message if failed else None


def differences(read: list[dict[str, Any]], raw: dict[str, Any], hf: Any) -> list[str]:
    """Where SGLang's layers have other values or rotary positions than the model's."""
    layers = [mixer for mixer in facts_from_config(raw, "config.json").mixers if isinstance(mixer, Attention)]
    wrong = [] if len(read) == len(layers) else [f"{len(read)} layers for {len(layers)}"]
    for mixer, theirs in zip(layers, read, strict=False):
        ours = {"cap": mixer.cap, "width": mixer.width, "window": mixer.window}
        wrong += [f"{key}: {theirs[key]} for {value}" for key, value in ours.items() if theirs[key] != value]
        wrong += [] if math.isclose(theirs["factor"], mixer.factor) else [f"factor: {theirs['factor']}"]
        ones = torch.ones(len(theirs["rotated"]), 1, mixer.width)
        tables = Rope(hf).cos_sin(torch.arange(len(ones)), torch.float32)
        if mixer.rope is not None and not torch.allclose(
            theirs["rotated"], rotate(ones, *tables, 1.0)[:, 0], atol=1e-5
        ):
            wrong.append("rotary positions")
    return wrong


@pytest.mark.parametrize(
    "model_type", [name for name, known in ARCHITECTURES.items() if known.served.needs_gpu is True]
)
def test_classes_that_need_a_gpu_read_drawn_configs_as_transformers_does(
    model_type,
    tmp_path,
    config_of,  # noqa: F811
    capsys,
):
    """What a CPU can show of these classes: scores, windows, widths and rotary positions of every layer."""
    raws = [raw for raw in drawn(model_type, 60) if refusal(raw, config_of, "cluster.device_memory_gb=80") is None]
    cases, models = [], []
    for number, raw in enumerate(raws[:READ]):
        (folder := tmp_path / str(number)).mkdir()
        models.append(load_hf_config(ModelConfig(hf_config=raw)))
        write_metadata(folder, models[-1], None, torch.float32)
        attention = {"gpt_oss": "intel_amx", "exaone4": "triton"}.get(model_type, "torch_native")
        case = {"folder": str(folder), "dtype": "float32", "tp": 1, "ep": 1, "attention": attention}
        cases.append({**case, "out": str(folder / "out")})
    (tmp_path / "cases").write_text(json.dumps(cases))
    paths = [str(tmp_path / "cases"), *map(str, (LOADERS.parent, LOADERS, *STAND_INS))]
    assert run_program(PROGRAM, paths, tmp_path / "log") == 0, (tmp_path / "log").read_text()[-3000:]
    found = [
        differences(torch.load(f"{case['out']}.0"), *model) for case, *model in zip(cases, raws, models, strict=False)
    ]
    with capsys.disabled():
        print(f"\n{model_type}: the class reads {found.count([])} of {len(cases)} configs alike")
    assert cases, "all configs were refused"
    assert not any(found), [(wrong, raw) for wrong, raw in zip(found, raws, strict=False) if wrong]


def gap(folder: Path, raw: dict[str, Any]) -> float | None:
    """How far the server's log-probs of greedy tokens are from transformers'; None: transformers fails."""
    folder.mkdir()
    made = families.reference(raw, folder)
    if made is None:
        return None
    model, _ = made
    prompt = families.token_ids(PROMPT, raw["vocab_size"], 5).tolist()
    with serving(folder, model) as url:
        probe = greedy_probe(ServerApi(url, KEY, "server 0"), prompt, NEW, 60.0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + probe.token_ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
    theirs = logits.log_softmax(-1)
    chosen = theirs.gather(1, torch.tensor(probe.token_ids)[:, None])[:, 0]
    missed = (theirs.max(-1).values - chosen).max().item()  # of tokens that are not the likeliest
    return max(missed, (torch.tensor(probe.logprobs) - chosen).abs().max().item())


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_drawn_models_are_served_as_transformers_computes_them(model_type, tmp_path, config_of, capsys):  # noqa: F811
    equal, refused, wrong = 0, [], []
    for number, raw in enumerate(drawn(model_type, 40)):
        if why := refusal(raw, config_of):
            refused.append(why)
            continue
        try:
            worst = gap(tmp_path / str(number), raw)
        except Exception as error:
            wrong.append((f"{type(error).__name__}: {error}"[-300:], raw))
        else:
            wrong += [(worst, raw)] if worst is not None and worst >= CLOSE else []
            equal += worst is not None and worst < CLOSE
        if equal + len(wrong) >= SERVED:
            break
    with capsys.disabled():
        print(f"\n{model_type}: {equal} equal, {len(refused)} refused", *sorted(set(refused)), sep="\n    ")
    assert not wrong, "\n\n".join(str(each) for each in wrong)
