"""Vision-language models against transformers: log-probs, gradients, greedy generation, names and exports.

Tolerances: float32 of values of size 1 to 10, whose sums run in another order.
"""

import functools
import importlib.util
import itertools
import json
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given
from hypothesis import settings as of_draws
from safetensors.torch import load_file, save_file

from megarl.architectures.decoders import canonical_name
from megarl.architectures.vision_language import FAMILIES
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.data.image_set import STILL
from megarl.models.hf import encoder_of, image_settings, load_hf_config
from megarl.models.packing import pack_stream
from megarl.models.vlm.model import next_position, positions_of
from megarl.models.weight_table import as_index
from megarl.models.weights.fill import draw_tensor, local_shards
from megarl.training.microbatch import build, plan
from megarl.training.vlm_sequences import ImageLayout
from tests.dist import layout_for, single_process
from tests.models import tiny
from tests.models.families import fitting_images, with_adapters
from tests.models.tiny import single_experts
from tests.models.vlm_tiny import EVERY_KIND, batch_of, config_of, draw, logits_of, save, save_config, shallow_config

CPU = torch.device("cpu")
build_tiny = functools.partial(tiny.build_tiny, vision=True)
SHAPES = [((2, 3),), (), ((1, 1), (4, 2)), ((3, 3),), ((1, 5),)]


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


@pytest.fixture(scope="module", params=EVERY_KIND)
def made(request, tmp_path_factory):
    """A model of each kind: folder, transformers' model, samples, image settings."""
    folder = tmp_path_factory.mktemp(request.param)
    return of_config(folder, shallow_config(request.param))


def only(*kinds):
    """Run a test, whose property depends little on the kind of model, with these kinds only."""
    return pytest.mark.parametrize("made", kinds, indirect=True)


def of_config(folder, raw):
    reference = save_config(folder, raw)
    hf = load_hf_config(ModelConfig(path=str(folder), vision=True))
    rng, encoder, settings = random.Random(1), encoder_of(hf), image_settings(hf)
    samples = [draw(rng, encoder, *shapes) for shapes in SHAPES]
    samples.append(type(samples[0])(samples[0].prompt, [7, 8, 9], samples[0].images, samples[0].starts))  # of its group
    return folder, reference, samples, settings


def packed(model, samples, settings):
    """Log-probs of the responses, from one packed stream."""
    sequences = ImageLayout(encoder_of(model.hf_config))
    micro = build(batch_of(samples, settings), range(len(samples)), layout_for(ParallelConfig()), CPU, None, sequences)
    hidden = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
    logits = F.linear(hidden[micro.rows, 0], model.lm_head_weight)
    found = torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]
    return found, micro


def expected(reference, samples, settings):
    rows = []
    for sample in samples:
        logp = torch.log_softmax(logits_of(reference, sample, settings), -1)
        rows.append(logp.gather(1, torch.tensor(sample.response)[:, None])[:, 0])
    return torch.cat(rows)


def test_logprobs_and_gradients_equal_transformers_packed_with_shared_images_and_without(made):
    folder, reference, samples, settings = made
    (model,) = build_tiny(folder)
    ours, micro = packed(model, samples, settings)
    encoder = encoder_of(model.hf_config)
    features = sum(rows * columns for shapes in SHAPES for rows, columns in shapes)
    assert len(micro.packed.seen.patches) == features * encoder.merge**2, "the group's images are there once"
    want = expected(reference, samples, settings)
    torch.testing.assert_close(ours, want, atol=5e-6, rtol=0)
    weights = torch.randn(len(want), generator=torch.Generator().manual_seed(0))
    (ours * weights).sum().backward()
    reference.zero_grad()
    (want * weights).sum().backward()
    theirs = dict(reference.model.visual.named_parameters())
    for name, parameter in model.visual.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=1e-4, msg=name)
    kind = model.hf_config.vision_language["model_type"]
    every = {
        canonical_name(kind, each, vision=True): part
        for name, tensor in reference.named_parameters()
        for each, part in single_experts(name, tensor.grad)
    }
    for shard, parameter in local_shards([model]):
        for piece in () if shard.param.startswith("visual.") else shard.pieces:
            torch.testing.assert_close(
                parameter.grad[as_index(piece.target_region)],
                every[piece.source][as_index(piece.source_region)],
                atol=5e-4,
                rtol=1e-3,
                msg=lambda text, piece=piece: f"{piece.source}: {text}",
            )


@only("qwen2_5_vl")
def test_the_budget_of_a_micro_batch_is_of_tokens_and_of_the_patches_that_its_encoder_sees(made):
    folder, _, samples, settings = made
    layout, hf = layout_for(ParallelConfig()), load_hf_config(ModelConfig(path=str(folder), vision=True))
    sequences, batch = ImageLayout(encoder_of(hf)), batch_of([*samples, *samples[::-1]], settings)
    lengths = sequences.lengths(batch).tolist()
    for budget in (40, 60, 100):
        found = plan(batch, budget, layout, CPU, sequences, patch_tokens=0.5)
        assert sorted(number for group in found for number in group) == list(range(len(lengths)))
        assert len(found) > len(plan(batch, budget, layout, CPU, sequences)), "text by itself needs fewer"
        for group in found:
            seen = build(batch, group, layout, CPU, None, sequences).packed.seen
            cost = sum(lengths[number] for number in group) + (0 if seen is None else 0.5 * len(seen.patches))
            assert cost <= budget or len(group) == 1


@only("qwen2_5_vl")
def test_each_sample_alone_has_the_same_logprobs(made):
    folder, _, samples, settings = made
    (model,) = build_tiny(folder)
    with torch.no_grad():
        together, _ = packed(model, samples, settings)
        alone = torch.cat([packed(model, [sample], settings)[0] for sample in samples])
    torch.testing.assert_close(together, alone, atol=5e-6, rtol=0)


@only("qwen2_vl", "qwen3_5")
def test_one_row_positions_would_be_noticed(made):
    """They change log-probs by thousandths only, which nobody would see in a run."""
    folder, reference, samples, settings = made
    (model,) = build_tiny(folder)
    with torch.no_grad():
        _, micro = packed(model, samples, settings)
        plain = torch.cat([torch.arange(len(s.prompt) + len(s.response) - 1) for s in samples])[None]
        hidden = model(micro.input_ids, plain, None, packed_seq_params=micro.packed)
        logits = F.linear(hidden[micro.rows, 0], model.lm_head_weight)
        wrong = torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]
        assert (wrong - expected(reference, samples, settings)).abs().max() > 1e-4


def test_positions_are_those_of_transformers(made):
    _, reference, _, _ = made
    rng = random.Random(3)
    for _ in range(30):
        ids, places = [1] * rng.randint(1, 3), []
        for _ in range(rng.randint(0, 3)):
            rows, columns = rng.randint(1, 5), rng.randint(1, 5)
            places.append((len(ids), rows, columns, STILL))
            ids += [150] * (rows * columns) + [1] * rng.randint(1, 4)
        tokens = torch.tensor([ids])
        grid = torch.tensor([[1, 2 * rows, 2 * columns] for _, rows, columns, _ in places]) if places else None
        want, delta = reference.model.get_rope_index(tokens, (tokens == 150).int(), grid)
        assert positions_of(len(ids), places).tolist() == want[:, 0].tolist()
        assert next_position(len(ids), places) == len(ids) + int(delta)


def test_text_continues_after_the_largest_position_of_a_video():
    """As in the code of the published models, and in SGLang; transformers 5.23 continues with 3 in place of 9."""
    places = [(1, 2, 1, 0), (3, 2, 1, 3), (5, 2, 1, 7), (9, 1, 1, STILL)]
    want = [[0, 1, 1, 4, 4, 8, 8, 9, 10, 11, 12], [0, 1, 2, 1, 2, 1, 2, 9, 10, 11, 12], [0, *[1] * 6, 9, 10, 11, 12]]
    assert positions_of(11, places).tolist() == want
    assert next_position(11, places) == 13


def test_generation_is_greedy_as_transformers_would_be(made):
    check_generation(*made, turns=False)


@only("qwen3_vl_moe")
def test_turns_are_greedy_as_transformers_would_be(made):
    check_generation(*made, turns=True)


def check_generation(folder, reference, samples, settings, *, turns):
    """Every sampled token is the likeliest of transformers after those before it, and has its log-prob."""
    from megarl.data.image_set import image_sets
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.engine import Request

    engine = EmbeddedEngine(build_tiny(folder), RolloutConfig(max_running=3), layout_for(ParallelConfig()))
    sets = image_sets(batch_of(samples, settings))
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    if turns:
        generation, done = engine.open(sampling, [], len(samples), 100), {}
        for number, (sample, images) in enumerate(zip(samples, sets, strict=True)):
            generation.submit(number, list(sample.prompt), 1, 6, images)
        while len(done) < len(samples):
            done |= generation.wait()
        found = [done[number] for number in range(len(samples))]
    else:
        requests = [Request(s.prompt, [1, 2], images=images) for s, images in zip(samples, sets, strict=True)]
        found = [one[1] for one in engine.generate(requests, sampling, [])]
    for sample, completion in zip(samples, found, strict=True):
        own = type(sample)(sample.prompt, completion.token_ids, sample.images, sample.starts)
        logp = torch.log_softmax(logits_of(reference, own, settings), -1)
        assert logp.argmax(-1).tolist() == completion.token_ids
        chosen = logp.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, atol=1e-5, rtol=0)


def test_an_export_is_the_same_model_for_transformers(made, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    from megarl.artifacts.facts import known_facts
    from megarl.checks.weights import check_weights
    from megarl.models.weights import export_weights
    from tests.dist import world

    folder, reference, samples, settings = made
    chunks = build_tiny(folder)
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, world=world())
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        for sample in samples[:3]:
            # Experts round differently where their weights lie differently in memory.
            ours, theirs = (logits_of(model, sample, settings) for model in (again, reference))
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    for (name, first), second in zip(
        chunks[0].named_parameters(), build_tiny(tmp_path / "out")[0].parameters(), strict=True
    ):
        assert torch.equal(first, second), name
    for place in (folder, tmp_path / "out"):  # of transformers, and of this package
        check_weights(place, known_facts(ModelConfig(path=str(place), vision=True), ""))
    assert AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil").patch_size == settings.patch


@only("qwen2_vl", "qwen3_5")
@pytest.mark.parametrize("prefixes", [("model.", "visual."), ("model.language_model.", "model.visual.")])
def test_both_published_forms_of_names_are_read(made, prefixes, tmp_path):
    folder, *_ = made
    (model,) = build_tiny(folder)
    decoder, encoder = prefixes
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removeprefix("model.")
        if short.startswith("visual."):
            renamed[encoder + short.removeprefix("visual.")] = tensor
        elif name.startswith("model."):
            renamed[decoder + short.removeprefix("language_model.")] = tensor
        else:
            renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (again,) = build_tiny(tmp_path)
    for (name, first), second in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second), name


def test_norms_of_a_random_encoder_store_their_factor_itself():
    hf = load_hf_config(ModelConfig(hf_config=config_of("qwen3_5"), vision=True))
    drawn = {
        name: draw_tensor(hf, name, (2,), 0).tolist()
        for name in ("model.visual.merger.norm.weight", "model.norm.weight")
    }
    assert drawn == {"model.visual.merger.norm.weight": [1, 1], "model.norm.weight": [0, 0]}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_5_moe"])
def test_the_language_model_can_be_used_without_its_encoder(kind, tmp_path):
    reference = save(tmp_path, kind)
    (model,) = tiny.build_tiny(tmp_path, vision=False)
    tokens = torch.arange(5, 25)[None]
    stream = pack_stream([20])
    hidden = model(stream.input_ids(tokens[0]), stream.position_ids, None, packed_seq_params=stream.params)
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits[0]
    torch.testing.assert_close(F.linear(hidden[:, 0], model.lm_head_weight), expected, atol=1e-5, rtol=1e-5)
    assert not any(name.startswith("visual.") for name, _ in model.named_parameters())
    assert not any("visual" in name or "language_model" in name for name in model.weight_table.shapes())


@pytest.mark.campaign("families")
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_drawn_models_with_images_are_equal(kind, tmp_path):
    """Log-probs, packed and of each sample, gradients, greedy generation and the export, in 30 configurations."""
    count = itertools.count()

    @of_draws(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(raw=fitting_images(kind))
    def each(raw):
        folder = tmp_path / str(next(count))
        folder.mkdir()
        model = of_config(folder, raw)
        test_logprobs_and_gradients_equal_transformers_packed_with_shared_images_and_without(model)
        test_each_sample_alone_has_the_same_logprobs(model)
        test_generation_is_greedy_as_transformers_would_be(model)
        test_an_export_is_the_same_model_for_transformers(model, folder)
        check_adapters(*model)

    each()


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.campaign("lora")) for kind in sorted(FAMILIES))]
)
def test_adapters_of_decoder_and_encoder_are_read_by_transformers_and_peft(kind, tmp_path):
    check_adapters(*of_config(tmp_path, shallow_config(kind)))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_an_adapter_with_names_of_a_language_model_keeps_the_encoder_unless_the_base_is_read_without(
    kind, tmp_path, capsys
):
    from megarl.artifacts.adapter_settings import PLAIN
    from megarl.models.convert import convert

    save_config(tmp_path / "base", raw := shallow_config(kind))
    (tmp_path / "adapter").mkdir()
    settings = {**PLAIN, "r": 2, "lora_alpha": 2, "lora_dropout": 0.0, "target_modules": ["down_proj"]}
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    layer, width = "base_model.model.model.layers.0.mlp.down_proj.lora_", raw["text_config"]["intermediate_size"]
    save_file(
        {f"{layer}A.weight": torch.ones(2, width), f"{layer}B.weight": torch.ones(64, 2)},
        tmp_path / "adapter/adapter_model.safetensors",
    )
    convert(tmp_path / "adapter", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    left_out = kind == "qwen3_5"
    assert any("visual." in name for name in after) != left_out
    assert ("left out" in capsys.readouterr().out) == left_out
    ending = "layers.0.mlp.down_proj.weight"
    old, new = (next(t for name, t in tensors.items() if name.endswith(ending)) for tensors in (before, after))
    torch.testing.assert_close(new, old + 2)


def check_adapters(folder, reference, samples, settings):
    """After an update, the merged export is the model with adapters, and so is PEFT's model of the exported ones."""
    from transformers import AutoModelForImageTextToText

    from megarl.architectures.adapters import is_adapter
    from megarl.artifacts.facts import known_facts
    from megarl.models.convert import convert
    from megarl.models.weights import export_weights
    from megarl.models.weights.files import CheckpointReader
    from megarl.models.weights.peft import export_adapter
    from megarl.planning.shards import adapter_parameters
    from megarl.sync.source import Pieces
    from tests.dist import world

    facts = known_facts(ModelConfig(path=str(folder), vision=True), "")
    model = with_adapters(folder, facts)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(adapter_parameters(facts, ParallelConfig(), model.config.lora)) == trained
    packed(model, samples, settings)[0].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert is_adapter(name), f"{name} would be trained"
            parameter.data -= 0.05 * parameter.grad / parameter.grad.abs().max().clamp(min=1e-9)
    export_weights([model], folder / "merged", model.hf_config, world=world())
    lora = model.config.lora
    export_adapter([model], folder / "adapter", lora, base=str(folder), world=world())
    again = AutoModelForImageTextToText.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        wanted = expected(again, samples, settings)
        torch.testing.assert_close(packed(model, samples, settings)[0], wanted, atol=2e-5, rtol=0)
    convert(folder / "adapter", folder / "converted")
    assert (folder / "converted/model.safetensors").read_bytes() == (folder / "merged/model.safetensors").read_bytes()
    if importlib.util.find_spec("peft"):
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(reference.eval(), folder / "adapter").get_base_model()
        with torch.no_grad():
            torch.testing.assert_close(expected(adapted, samples, settings), wanted, atol=2e-5, rtol=0)
    merged = CheckpointReader(folder / "merged", vision=True)
    for (name, region), tensor in Pieces([model]).items():
        assert torch.equal(tensor, merged.read(name, region)), f"{name} for servers is not the merged one"
