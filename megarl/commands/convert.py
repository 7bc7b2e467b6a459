"""`megarl convert`: turn a Hugging Face folder, a PEFT adapter or a run's checkpoint into a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts.conversion import check_conversion
from megarl.artifacts.pipes import refuse_pipes
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megarl.training.engine import Weights


def convert(source: Path, target: Path, *, dtype: str | None = None, max_shard_gb: float = 4.0) -> None:
    """Write the model in `source` (Hugging Face folder or hub name, folder of a PEFT adapter, or
    RUN_DIR/checkpoints/step_N) to the new or empty folder `target`. Adapters are merged; a file has at most
    `max_shard_gb` (10**9 bytes).
    """
    refuse_pipes(source)
    check_conversion(source, target, max_shard_gb)  # quick checks first: torch is imported below
    from megarl.models.convert import convert as convert_folder

    try:
        if (source / "meta.json").is_file():
            _convert_checkpoint(source, target, dtype, max_shard_gb)
        else:
            convert_folder(source, target, dtype=dtype, max_shard_gb=max_shard_gb)
    except OSError as error:
        raise ConfigError(
            f"a file cannot be read or written ({error.strerror or error})",
            where="megarl convert",
            found=str(error.filename or target),
            fix="check permissions and free space",
        ) from error


def describe(folder: Path) -> str:
    """Describe a Hugging Face folder: tensors, dtypes, bytes, files."""
    from megarl.models.weights.files import CheckpointReader

    reader = CheckpointReader(folder, vision=True)
    dtypes = ", ".join(sorted({reader.dtype(name) for name in reader.names()}))
    size = sum(file.stat().st_size for file in reader.files) / 1e9
    files = count(len(reader.files), "file")
    return f"{folder}: {count(len(reader.names()), 'tensor')}, {dtypes}, {size:.3g} GB in {files}"


def _convert_checkpoint(folder: Path, target: Path, dtype: str | None, max_shard_gb: float) -> None:
    """Load a checkpoint of any layout into one process and export it."""
    from megarl.config.load import load_config
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.weights import export_weights
    from megarl.runtime.frozen_models import check_base
    from megarl.runtime.setup import build_engine, weights_of
    from megarl.system.comm import single_world
    from megarl.system.device import DTYPES, dist_backend
    from megarl.training import checkpoint
    from megarl.training.parallel import init_parallel

    recipe = folder.resolve().parents[1] / "config.yaml"
    if not recipe.is_file():
        fix = "keep the checkpoint at RUN_DIR/checkpoints/step_N"
        raise ConfigError("the run's config.yaml is missing", where=str(recipe), fix=fix)
    config = load_config(recipe)
    whole = config.actor.model_copy(update={"parallel": ParallelConfig()})
    config = config.model_copy(update={"actor": whole})
    world = single_world(dist_backend(), config.cluster.timeout_s)
    with closing(init_parallel(ParallelConfig(), world)) as layout:
        meta = checkpoint.verify(folder, world)
        hf_config = _config_of(config.model, checkpoint.stored_names(folder, meta))
        weights: Weights = lambda chunks: None  # noqa: E731
        if config.model.lora is not None:  # the checkpoint holds only the adapters
            weights = weights_of(config, hf_config)
            check_base(folder, config.model.path, world)
        engine = build_engine(config, hf_config, layout, weights, trainable=False)
        checkpoint.load(folder, {"actor": engine}, meta)
        config.task.complete_export(config, hf_config, folder)
        tokenizer = load_tokenizer(config.model)
        export_weights(
            engine.chunks,
            target,
            hf_config,
            tokenizer,
            world=world,
            dtype=DTYPES[dtype] if dtype else None,
            max_shard_gb=max_shard_gb,
            source=config.model.path,
            keep_draft=True,
            classifies=config.trains_reward_model,
        )


def _config_of(model: ModelConfig, stored: Iterable[str]) -> PretrainedConfig:
    """Return the Hugging Face configuration with which the actor of a checkpoint was built.

    For a hub model only config.json is downloaded. `stored` holds the names of the checkpoint's tensors, which show
    whether the model had an output layer of its own. For adapters the whole base model is downloaded, since the
    conversion merges them into it.
    """
    from megarl.models.config import load_hf_config

    if model.path is None or model.lora is not None or Path(model.path).expanduser().is_dir():
        return load_hf_config(model)
    hf_config = load_hf_config(model, follow_files=False)
    if "actor.output_layer.weight" in stored:
        hf_config.tie_word_embeddings = False
    return hf_config
