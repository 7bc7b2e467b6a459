"""A tiny robot policy in the simulator of tests/robots/simulators/line.py: recipes of whole runs."""

from __future__ import annotations

from pathlib import Path

LINE = Path(__file__).parent / "simulators" / "line.py"
RECIPE = f"""
name: line
model:
  hf_config:
    model_type: openvla
    vision_towers: [{{width: 16, blocks: 1, heads: 2, mlp: 32, patch: 4, image: 8}}]
    state_dim: 2
    n_action_bins: 17
    pad_to_multiple_of: 0
    text_config: {{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 4,
      intermediate_size: 48, vocab_size: 64, max_position_embeddings: 64, tie_word_embeddings: false,
      initializer_range: 0.1, pad_token_id: 0, bos_token_id: 1, eos_token_id: 2}}
  tokenizer: "chars:abcdefghijklmnopqrstuvwxyz "
  dtype: fp32
robot:
  simulator: {{name: "{LINE}:Line", workers: 2, retries: 0, limit: 6, construct_s: 30, answer_s: 20}}
  family: small
  dim: 2
  chunk: 2
  cameras: [front, wrist]
  held_out: 2
algorithm: {{pipeline: srpo}}
data: {{train_files: [simulator], val_files: [simulator], batch_size: 4}}
rollout: {{sampling: {{n: 4}}}}
validation: {{every: 2}}
sft: {{train_files: [experts], steps: 3, batch_size: 8, optim: {{lr: 1.0e-2}}}}
actor: {{optim: {{lr: 1.0e-3}}, engine: {{micro_batch_tokens: 200}}}}
trainer: {{steps: 3, save_every: 1}}
cluster: {{nproc: 2, threads: 1, timeout_s: 200}}
tracking: {{mlflow: false, report: false}}
"""


def write_robots_recipe(folder: Path, workers: int = 2) -> Path:
    """The tiny recipe; `workers`: processes of simulators of each rank."""
    path = folder / "line.yaml"
    path.write_text(RECIPE.replace("workers: 2,", f"workers: {workers},"))
    return path


def write_flow_recipe(folder: Path) -> Path:
    """The tiny recipe with a policy that denoises its actions."""
    text = RECIPE.replace("name: line", "name: flow", 1).replace("family: small", "family: pi0")
    text = text.replace("tie_word_embeddings: false", "tie_word_embeddings: true")
    expert = "action_expert: {hidden_size: 32, intermediate_size: 48, action_dim: 2, state_dim: 2}"
    path = folder / "flow.yaml"
    path.write_text(text.replace("state_dim: 2", expert))
    return path
