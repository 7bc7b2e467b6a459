"""`megarl convert`: the same tensors in another dtype and other files, and the way from a checkpoint of a run."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megarl.commands.convert import convert, describe
from megarl.config.load import dump_config
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.system.errors import ConfigError
from tests.models.tiny import save_tiny, tiny_dict


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_cast_and_reshard(tmp_path):
    save_tiny(tmp_path / "in", "qwen3_moe")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "in", tmp_path / "out", dtype="bf16", max_shard_gb=1e-4)
    source, written = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in source)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_dtype_is_kept_by_default(tmp_path):
    save_tiny(tmp_path / "in", "llama", tie_word_embeddings=True)
    convert(tmp_path / "in", tmp_path / "out")
    source, written = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert all(torch.equal(written[name], source[name]) for name in source)


def changed(folder, model_type: str, changes: dict[str, torch.Tensor]):
    """A tiny model in `folder` with some tensors in place of its own, or in addition to them."""
    save_tiny(folder, model_type)
    save_file(tensors(folder) | changes, folder / "model.safetensors", metadata={"format": "pt"})


def test_each_tensor_keeps_its_own_dtype_and_the_config_names_that_of_most_numbers(tmp_path):
    norm, bias = torch.ones(64, dtype=torch.float64), torch.ones(64, dtype=torch.float16)
    changed(tmp_path / "in", "qwen2", {"model.norm.weight": norm, "model.layers.1.self_attn.q_proj.bias": bias})
    convert(tmp_path / "in", tmp_path / "out")
    source, written = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in written.items()} == {name: t.dtype for name, t in source.items()}
    assert all(torch.equal(written[name], source[name]) for name in source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_a_stack_of_experts_has_the_widest_dtype_of_its_matrices(tmp_path):
    from megarl.models.weights.files import FolderWriter

    names = [f"m.mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up")]
    values = {name: torch.full((2, 3), 1 + 2**-12 * i).to(torch.float64) for i, name in enumerate(names)}
    values[names[0]] = values[names[0]].bfloat16()
    shapes, dtypes = (
        {name: read(t) for name, t in values.items()} for read in (lambda t: tuple(t.shape), lambda t: t.dtype)
    )
    with FolderWriter(tmp_path / "out", shapes, dtypes, 1 << 30, stacked=True) as writer:
        for name in names:
            writer.add(name, values[name])
    (stack,) = tensors(tmp_path / "out").values()
    assert stack.dtype == torch.float64
    assert torch.equal(stack[1].t(), torch.cat([values[names[2]], values[names[3]]]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model.layers.0.self_attn.gate.weight": torch.ones(4)},
            ["1 tensor that the model", "self_attn.gate.weight"],
        ),
        ({"model.norm.weight": torch.ones(65)}, ["'model.norm.weight' has a different shape", "65", "64"]),
        (
            {"model.layers.0.mlp.up_proj.weight": torch.ones(95, 64)},
            ["up_proj.weight' has a different shape", "96, 64"],
        ),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(0, 64)}, ["up_proj.weight' has a different shape", "0, 64"]),
        ({"score.weight": torch.ones(3, 64)}, ["'score.weight' has a different shape", "1, 64"]),
    ],
)
def test_a_model_that_training_would_not_read_is_not_converted(tmp_path, changes, words):
    changed(tmp_path / "in", "llama", changes)
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "in", tmp_path / "out")
    assert all(part in str(error.value) for part in words), error.value
    assert error.value.fix is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_checkpoint_of_a_run(tmp_path):
    from megarl.models.config import load_hf_config
    from megarl.models.weights import init_random
    from megarl.runtime.setup import build_engine, init_processes
    from megarl.training import checkpoint
    from tests.dist import no_parallel, single_process

    single_process()
    no_parallel()  # init_processes makes the groups
    fields = tiny_dict("qwen3", vocab_size=16, bos_token_id=0, eos_token_id=1)
    model = ModelConfig(hf_config=fields, tokenizer="chars:0123456789+=", dtype="fp32")
    config = RunConfig(name="tiny", model=model)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(config))
    hf = load_hf_config(model)
    layout = init_processes(config, run_dir, config.actor.parallel)
    engine = build_engine(config, hf, layout, lambda c: init_random(c, hf, 3), trainable=False)
    folder = checkpoint.save(run_dir / "checkpoints", 5, {"actor": engine}, {})
    names = checkpoint.stored_names(folder, checkpoint.verify(folder, engine.layout.world))
    assert ("actor.output_layer.weight" in names) != hf.tie_word_embeddings
    layout.close()
    convert(folder, tmp_path / "out")
    written = tensors(tmp_path / "out")
    assert torch.equal(written["model.embed_tokens.weight"], engine.chunks[0].embedding.word_embeddings.weight[:16])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2")


def test_taken_target_is_refused(tmp_path):
    save_tiny(tmp_path / "in", "llama")
    with pytest.raises(ConfigError, match="not an empty folder"):
        convert(tmp_path / "in", tmp_path / "in")


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a model nor a checkpoint"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="folder does not exist"):
        convert(tmp_path / "no" / "such", tmp_path / "out")


def test_a_run_folder_is_answered_with_its_newest_checkpoint_or_its_model(tmp_path):
    for step in ("step_2", "step_10", "step_11.tmp-1"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "meta.json").write_text("{}")
    for source in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(ConfigError, match=r"did you mean .*checkpoints/step_10\?"):
            convert(source, tmp_path / "out")
    save_tiny(tmp_path / "hf", "llama")
    with pytest.raises(ConfigError, match=r"did you mean .*/hf\?"):
        convert(tmp_path, tmp_path / "out")


def test_damaged_files_and_places_that_cannot_be_written_are_named(tmp_path):
    save_tiny(tmp_path / "in", "llama")
    with pytest.raises(ConfigError, match="cannot create the target below a file"):
        convert(tmp_path / "in", tmp_path / "in" / "config.json" / "out")
    with pytest.raises(ConfigError, match="--max-shard-gb"):
        convert(tmp_path / "in", tmp_path / "out", max_shard_gb=0)
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model\.safetensors: the safetensors file is damaged or incomplete"):
        convert(tmp_path / "in", tmp_path / "out")


def test_what_was_written_is_described(tmp_path):
    save_tiny(tmp_path / "in", "llama")
    convert(tmp_path / "in", tmp_path / "out", dtype="bf16")
    count = len(tensors(tmp_path / "out"))
    assert re.fullmatch(rf".*/out: {count} tensors, BF16, \S+ GB in 1 file", describe(tmp_path / "out"))


def test_missing_tensor_is_named_and_nothing_is_left(tmp_path):
    save_tiny(tmp_path / "in", "llama")
    left = tensors(tmp_path / "in")
    del left["model.norm.weight"]
    save_file(left, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        convert(tmp_path / "in", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_checkpoint_of_a_hub_model_says_itself_whether_it_has_a_head(monkeypatch, tmp_path):
    """Nothing but config.json is fetched."""
    from megarl.commands.convert import _config_of
    from megarl.models import hf as models_hf
    from megarl.models.weights import files

    def fetched(source):
        raise AssertionError(f"weights of {source} are fetched")

    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    found = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", lambda path, **more: (found, more))
    read = models_hf.read_hf_config
    monkeypatch.setattr(models_hf, "read_hf_config", lambda path, *rest, **more: read(str(tmp_path), *rest, **more))
    monkeypatch.setattr(files, "resolve_folder", fetched)
    model = ModelConfig(path="org/tied")
    assert _config_of(model, {"actor.embedding.word_embeddings.weight"}).tie_word_embeddings
    assert not _config_of(model, {"actor.output_layer.weight"}).tie_word_embeddings
