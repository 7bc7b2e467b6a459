"""Run by another interpreter: what its transformers makes of folders. One line of JSON on standard output.

usage: python older_reader.py FOLDER ...
"""

import inspect
import json
import logging
import sys

import torch
import transformers

TEXT = "12+34=46"
TOKENS = 48


def log_probs(model, seen: dict) -> list[list[float]]:
    """Of all tokens after the same TOKENS random ones, an image among them; the values of a classifier."""
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(0, min(size, 100), (1, TOKENS), generator=torch.Generator().manual_seed(3))
    if seen:
        image, before = model.config.image_token_id, model.config.vision_start_token_id
        count = int(seen["image_grid_thw"].prod()) // model.config.vision_config.spatial_merge_size**2
        ids[0, 4 : 5 + count] = torch.tensor([before] + [image] * count)
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            seen = {**seen, "mm_token_type_ids": (ids == image).int()}
    with torch.no_grad():
        # with one, transformers 4 does not run a Qwen3-Next without softmax attention
        out = model(input_ids=ids, use_cache=False, **seen).logits[0].double()
    return (out if out.shape[-1] == 1 else out.log_softmax(-1)).tolist()


def pixels(folder: str) -> dict:
    """What the folder's image processor makes of a picture."""
    picture = torch.arange(56 * 84 * 3).reshape(56, 84, 3).numpy().astype("uint8")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    return dict(processor(images=[picture], return_tensors="pt", min_pixels=28 * 28, max_pixels=84 * 84))


def read(folder: str) -> dict:
    """What can be compared of one folder."""
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    critic = "TokenClassification" in config["architectures"][0]
    kind = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    seen = {}
    if "vision_config" in config:
        kind, seen = transformers.AutoModelForImageTextToText, pixels(folder)
    model = kind.from_pretrained(folder, attn_implementation="eager").float().eval()
    model.config.output_router_logits = False  # the loss that this would add needs a layer with experts
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "log_probs": log_probs(model, seen),
        "pixels": seen["pixel_values"].double().sum().item() if seen else 0.0,
        "dtype": "" if critic else str(kind.from_pretrained(folder, torch_dtype="auto").dtype),
        "tokens": tokenizer(TEXT)["input_ids"],
        "special": sorted(tokenizer.all_special_ids),
        "end": None if critic else transformers.GenerationConfig.from_pretrained(folder).eos_token_id,
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    found = {folder: read(folder) for folder in sys.argv[1:]}
    print(json.dumps({"transformers": transformers.__version__, "folders": found}))
