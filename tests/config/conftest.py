from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS

RECIPE = """
name: case
model:
  hf_config: {model_type: qwen3, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
              head_dim: 16, intermediate_size: 128, vocab_size: 32, max_position_embeddings: 256}
  tokenizer: "chars:0123456789+="
data:
  train_files: ["megarl.recipes.arithmetic:make_rows"]
  max_prompt_tokens: 16
rollout: {sampling: {max_new_tokens: 8}}
"""
REWARDED = f"{RECIPE}reward: {{name: exact_match}}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(text, name) -> path of a file in a folder that is also the current one."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "recipe.yaml") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write_file


@pytest.fixture
def config_of(write):
    """config_of("actor.parallel.tp=3", ...) -> a small valid recipe with these overrides."""
    file = write(REWARDED)
    return lambda *overrides: load_config(file, overrides, components=COMPONENTS)
