"""Optimizers step without the tracer of torch.compile, to the same numbers as with it."""

import subprocess
import sys

SCRIPT = """
import copy, sys, torch
from megarl.system.compat import torch_compile
from megarl.data.batch import Batch, Jagged


def steps(count, layer, optimizer):
    for number in range(count):
        layer(torch.arange(3.0) + number).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight.detach().clone()


def begin():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)


torch_compile.install()
torch_compile.install()
Batch({"x": Jagged.from_list([[1], [2, 3]])}).repeat(2)
layer, optimizer = begin()
optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
direct = steps(3, layer, optimizer)
assert not optimizer.state_dict()["state"][0]["exp_avg"].requires_grad
found = sorted(name for name in sys.modules if name.startswith("torch._dynamo"))
assert not found, found
import torch._dynamo
assert torch.equal(steps(3, *begin()), direct)
"""


def test_an_optimizer_steps_without_the_tracer_and_as_with_it():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=300)
