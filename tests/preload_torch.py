"""Imports what has nothing to do with Megatron, once, for all processes that ranks are forked from."""

import gc
import importlib

gc.disable()  # looking for garbage among what modules make takes a sixth of the time

for name in (
    *("torch.distributed", "pydantic", "yaml", "numpy.random", "psutil", "PIL.PngImagePlugin", "PIL.ImageOps"),
    "torch.fx.experimental.symbolic_shapes",  # the gradient of more than one number asks for it, and it takes a second
    *("transformers.models.qwen3.configuration_qwen3", "transformers.image_transforms", "transformers.video_utils"),
    *("transformers.convert_slow_tokenizer", "transformers.models.auto.tokenization_auto", "rich.console"),
    "transformers.modeling_utils",  # image encoders and classifiers of rewards need it, and it takes a second
    *("sklearn.cluster", "sklearn.preprocessing", "scipy.stats"),  # scores of robots' episodes: two seconds a rank
    *("rich._emoji_codes", "numpy.ctypeslib", "torch.profiler._cupti_monitor", "pytest", "hypothesis"),
):
    importlib.import_module(name)

gc.collect()
gc.freeze()
gc.enable()
