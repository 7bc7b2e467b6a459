"""The training of a draft head: its loss and gradients by brute force, and what it leaves as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig, MtpConfig, OptimConfig
from megarl.models.config import load_hf_config
from megarl.models.weights import export_weights, iter_hf_tensors, load_weights
from megarl.system.errors import ConfigError
from megarl.training.guard import NonFiniteError
from tests.dist import layout_for
from tests.models.draft_oracle import AFTER, APART, DraftOracle
from tests.training import cases

FAMILIES = (*AFTER, *APART)
SOON = ("deepseek_v3", "qwen3_5_text")


def make_engine(folder: Path, parallel: ParallelConfig | None = None, *, mtp: bool = True, tokens: int = 64, **more):
    from megarl.training.engine import MegatronEngine

    parallel = parallel or ParallelConfig()
    return MegatronEngine(
        load_hf_config(ModelConfig(path=str(folder))),
        parallel,
        EngineConfig(
            micro_batch_tokens=tokens,
            logits_chunk_tokens=16,
            recompute=more.pop("recompute", "none"),
            distributed_optimizer=more.pop("shards", True),
        ),
        OptimConfig(lr=1e-2, eps=1e-3, clip_grad=more.pop("clip", 0.0)),
        dtype=torch.float32,
        layout=more.pop("layout", None) or layout_for(parallel),
        total_steps=10,
        weights=lambda chunks: load_weights(chunks, folder),
        mtp=MtpConfig(loss_weight=0.5) if mtp else None,
    )


def make_batch(seed: int = 0):
    """Samples of which some prompts have one token and some tokens are those of the environment."""
    batch = cases.make_batch(seed=seed)
    responses = batch["response_ids"]
    mask = torch.rand(len(responses.values), generator=torch.Generator().manual_seed(5)) < 0.8
    return batch.with_values({"response_mask": responses.like(mask)})


def gradients(engine) -> dict[str, torch.Tensor]:
    """The gradients of all parameters by the names of checkpoints; the parameters are lost."""
    with torch.no_grad():
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return {name: tensor for name, tensor in iter_hf_tensors(engine.chunks, engine.layout.world) if tensor is not None}


@pytest.mark.parametrize(
    "model_type",
    [name if name in SOON else pytest.param(name, marks=pytest.mark.campaign("families")) for name in FAMILIES],
)
@pytest.mark.parametrize("tokens", [64, pytest.param(10_000, marks=pytest.mark.campaign("families"))])
def test_loss_and_gradients_are_those_of_the_formula(alone, model_type, tokens, tmp_path):
    oracle, batch = DraftOracle(model_type), make_batch()
    assert (batch["prompt_ids"].lengths == 1).any()
    oracle.save(tmp_path / "model")
    engine = make_engine(tmp_path / "model", tokens=tokens)
    loss = engine.train_step(batch, cases.loss_fn).result()["actor/mtp_loss"]
    oracle.double()
    expected = oracle.losses(batch).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    (0.5 * expected).backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    wanted, ours = oracle.tensors(tmp_path / "gradients"), gradients(engine)
    for name, tensor in wanted.items():
        if name.endswith("e_score_correction_bias"):
            continue
        # float32 sums of about 300 tokens; the largest element of a gradient is 0.01 to 1
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-3, atol=1e-5 + 1e-4 * float(tensor.abs().max()), msg=name
        )


def test_the_policy_trains_bit_for_bit_as_without_the_head(alone, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path)
    results = []
    for mtp in (False, True):
        engine = make_engine(tmp_path, mtp=mtp, clip=0.5)
        metrics = [engine.train_step(make_batch(seed), cases.loss_fn).result() for seed in range(3)]
        assert all(("actor/mtp_loss" in found) == mtp for found in metrics)
        results.append((metrics, {name: cases.digest(p) for name, p in engine.chunks[0].named_parameters()}))
    (plain, weights), (drafted, more) = results
    assert more.items() >= weights.items()
    assert all(found.items() >= wanted.items() for found, wanted in zip(drafted, plain, strict=True))


def test_full_recomputation_covers_the_head_and_changes_no_value(alone, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path)
    results = []
    for recompute, passes in (("none", 1), ("full", 2)):
        engine, calls = make_engine(tmp_path, recompute=recompute, tokens=10_000), []
        engine.chunks[0].draft.layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        metrics = engine.train_step(make_batch(), cases.loss_fn).result()
        assert len(calls) == passes
        results.append((metrics, {name: cases.digest(p) for name, p in engine.chunks[0].named_parameters()}))
    assert results[0] == results[1]


@pytest.mark.parametrize("shards", [True, False])
def test_a_gradient_of_the_head_that_is_not_finite_stops_the_step(alone, shards, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path)
    engine = make_engine(tmp_path, shards=shards)
    engine.train_step(make_batch(), cases.loss_fn)
    before = {name: cases.digest(p) for name, p in engine.chunks[0].named_parameters()}
    engine.chunks[0].draft.joint.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match=r"of the draft head nan(.|\n)*gradient of draft\.joint\.weight"):
        engine.train_step(make_batch(), cases.loss_fn)
    assert before == {name: cases.digest(p) for name, p in engine.chunks[0].named_parameters()}
    assert engine.step == 1


@pytest.mark.parametrize("shards", [True, False])
def test_the_head_is_clipped_by_its_own_norm(alone, shards, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path)
    norms = {}
    for clip in (0.0, 0.01):
        engine = make_engine(tmp_path, shards=shards, clip=clip)
        reported = engine.train_step(make_batch(), cases.loss_fn).result()["actor/mtp_grad_norm"]
        left = torch.stack([p.main_grad.norm() for p in engine.chunks[0].draft.parameters()]).norm().item()
        norms[clip] = (reported, left)
    assert norms[0.0][0] == pytest.approx(norms[0.0][1], rel=1e-5)
    assert norms[0.01] == pytest.approx((norms[0.0][0], 0.01), rel=1e-4)


def test_a_head_with_its_own_embedding_is_refused(alone, tmp_path):
    DraftOracle("qwen3_5_text").save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    with pytest.raises(ConfigError, match="its own embedding cannot be trained"):
        make_engine(tmp_path)
    make_engine(tmp_path, mtp=False)


def test_tensors_of_the_head_that_training_would_drop_are_refused(alone, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.4.gate.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensor that its training would drop(.|\n)*model\.layers\.4\.gate"):
        make_engine(tmp_path)
    make_engine(tmp_path, mtp=False)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:100])])
def test_an_export_without_the_first_files_has_the_head_and_a_warning(alone, damage, tmp_path):
    DraftOracle("glm4_moe").save(tmp_path / "model")
    engine = make_engine(tmp_path / "model")
    damage(tmp_path / "model/model.safetensors")
    more = {"source": tmp_path / "model", "keep_draft": True}
    with pytest.warns(UserWarning, match="may lack its copies of the embedding"):
        export_weights(engine.chunks, tmp_path / "out", engine.hf_config, world=engine.layout.world, **more)
    assert "model.layers.4.eh_proj.weight" in load_file(tmp_path / "out/model.safetensors")


def test_an_export_has_the_trained_head_and_what_repeats_the_model(alone, tmp_path):
    head = DraftOracle("glm4_moe").save(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    repeats = {f"model.layers.4.{name}.weight": torch.zeros(131, 64) for name in ("embed_tokens", "shared_head.head")}
    save_file(load_file(file) | repeats, file, metadata={"format": "pt"})
    engine = make_engine(tmp_path / "model")
    losses = [engine.train_step(make_batch(), cases.loss_fn).result()["actor/mtp_loss"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    more = {"source": tmp_path / "model", "keep_draft": True}
    export_weights(engine.chunks, tmp_path / "out", engine.hf_config, world=engine.layout.world, **more)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == load_file(file).keys()
    assert torch.equal(written["model.layers.4.embed_tokens.weight"], written["model.embed_tokens.weight"])
    assert torch.equal(written["model.layers.4.shared_head.head.weight"], written["lm_head.weight"])
    assert not any(torch.equal(written[name], head[name]) for name in head if not name.endswith("correction_bias"))
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    again = make_engine(tmp_path / "out")
    for name, parameter in engine.chunks[0].named_parameters():
        assert torch.equal(again.chunks[0].get_parameter(name), parameter), name
