"""Run by another interpreter: what its transformers makes of folders. One line of JSON on standard output.

usage: python older_reader.py FOLDER ...
"""

import json
import logging
import sys

import torch
import transformers

TEXT = "12+34=46"
TOKENS = 48


def log_probs(model) -> list[list[float]]:
    """Of all tokens after the same TOKENS random ones; the values of a classifier."""
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = model(input_ids=ids).logits[0].double()
    return (out if out.shape[-1] == 1 else out.log_softmax(-1)).tolist()


def read(folder: str) -> dict:
    """What can be compared of one folder."""
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        critic = "TokenClassification" in json.load(file)["architectures"][0]
    kind = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager").float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "log_probs": log_probs(model),
        "dtype": "" if critic else str(kind.from_pretrained(folder, torch_dtype="auto").dtype),
        "tokens": tokenizer(TEXT)["input_ids"],
        "special": sorted(tokenizer.all_special_ids),
        "end": None if critic else transformers.GenerationConfig.from_pretrained(folder).eos_token_id,
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    found = {folder: read(folder) for folder in sys.argv[1:]}
    print(json.dumps({"transformers": transformers.__version__, "folders": found}))
