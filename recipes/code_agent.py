"""An agent that lets the policy write a one-line Python function and runs it on tests, some of which stay hidden.

The policy sees one example. A wrong function gets the first test that it fails in reply, and another turn. The score is
1 if the last function passes all tests.

    f(3)=12                   the prompt
    def f(x):return x+9       the policy's first turn
    f(5)=20,not 14            the reply: a test that the function fails
    def f(x):return x*4       passes the tests that are shown, and those that are hidden

The code runs in a process of its own, which gets the inputs of the tests but neither their results nor the endpoint's
key, and can neither write files nor, in a sandbox, start processes. The sandbox protects the machine from it.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

_TURNS = 3
_SHOWN = 2  # number of tests that the policy may see; the first one is in the prompt
_INPUTS = 5
_RUN_S = 5.0
_OUTPUT = 4096  # bytes that are read of what the policy's code prints
_PR_SET_DUMPABLE = 4
#: Runs in the process of the code: the function's result, or the name of its error, for each input.
_RUN = """
import json, sys
code, inputs = json.loads(sys.stdin.read())
outputs, names = [], {}
try:
    exec(code, names)
    for x in inputs:
        y = names["f"](x)
        outputs.append(y if type(y) is int else type(y).__name__)
except BaseException as error:
    outputs = [type(error).__name__] * len(inputs)
print(json.dumps(outputs))
"""
#: Kind of function -> its text, and the function itself.
KINDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("x+{}", lambda x, a: x + a),
    "-": ("{}-x", lambda x, a: a - x),
    "*": ("x*{}", lambda x, a: x * a),
}


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Play an episode of at most three turns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the code cannot look into this process
    os.unlink(os.environ["MEGARL_TASK"])  # this file has the hidden tests
    tests = [(x, y) for x, y in task["row"]["tests"]]
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    outputs: list[Any] = []
    for turn in range(_TURNS):
        reply = _ask(messages)
        outputs = run(reply["content"], [x for x, _ in tests])
        failed = [place for place in range(_SHOWN) if outputs[place] != tests[place][1]]
        if not failed or turn + 1 == _TURNS:
            break
        x, y = tests[failed[-1]]
        messages += [reply, {"role": "user", "content": said(x, y, outputs[failed[-1]])}]
    right = [output == y for output, (_, y) in zip(outputs, tests, strict=True)]
    errors = sum(isinstance(output, str) for output in outputs) / len(outputs)
    return {"reward": float(all(right)), "info": {"shown_passed": float(all(right[:_SHOWN])), "code_errors": errors}}


def said(x: int, y: int, output: Any) -> str:
    """Return the reply to a function that gave `output` instead of `y`."""
    return f"f({x})={y},not {output}\n"


def run(code: str, inputs: Sequence[int]) -> list[Any]:
    """Return what the function `f` of some code returns for each input, or the name of an error."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps([code, list(inputs)]).encode())
        given.seek(0)
        argv = [sys.executable, "-I", "-S", "-c", _RUN]
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(argv, stdin=given, stdout=pipe, stderr=nothing, env={}, preexec_fn=_limit) as process:
            try:
                text = _output(process)
            finally:
                process.kill()
    try:
        outputs = json.loads(text)
    except (ValueError, RecursionError):  # the code may print JSON of its own
        outputs = None
    good = isinstance(outputs, list) and len(outputs) == len(inputs)
    return outputs if good else ["Error"] * len(inputs)


def _output(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first `_OUTPUT` bytes that a process prints within `_RUN_S` seconds; it may print gigabytes."""
    assert process.stdout, "it is a pipe"
    text, until = b"", time.monotonic() + _RUN_S
    while len(text) < _OUTPUT and select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(process.stdout.fileno(), _OUTPUT)
        if not piece:
            break
        text += piece
    return text[:_OUTPUT]


def _limit() -> None:
    for number, limit in (
        (resource.RLIMIT_CPU, 1),
        (resource.RLIMIT_AS, 256 << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        if sys.platform == "linux" or number != resource.RLIMIT_AS:  # macOS refuses limits of address space
            resource.setrlimit(number, (limit, limit))


def _ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the policy's message after these messages."""
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host)
    connection.request(
        "POST",
        f"/{path}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with connection.getresponse() as response:
        body = json.load(response)
    if response.status != 200:
        raise RuntimeError(f"the endpoint replied {response.status}: {body}")
    message: dict[str, str] = body["choices"][0]["message"]
    return message


def make_rows(split: str = "train", highest: int = 20, held_out: int = 512, seed: int = 0) -> list[dict[str, Any]]:
    """Return tasks: `prompt`, the `answer` as code, and `tests`, of which the first `_SHOWN` may be shown.

    Args:
        split: `train`, or `val` for the `held_out` tasks that are never trained on.
        highest: largest constant of a function.
        seed: seed of the inputs and of the choice of held-out tasks.
    """
    rows = []
    for kind, (text, function) in KINDS.items():
        for a in range(2, highest + 1):
            for first in range(2, 10):
                for second in range(2, 10):
                    if first == second:
                        continue
                    others = random.Random(f"{seed} {kind} {a} {first} {second}").sample(range(10, 100), _INPUTS - 2)
                    tests = [[x, function(x, a)] for x in (first, second, *others)]
                    answer = f"def f(x):return {text.format(a)}"
                    rows.append({"prompt": f"f({first})={tests[0][1]}\n", "answer": answer, "tests": tests})
    random.Random(seed).shuffle(rows)
    return rows[:held_out] if split == "val" else rows[held_out:]


def make_demonstrations(
    split: str = "train", often: float = 0.4, seldom: float = 0.1, seed: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """Return conversations. The first function agrees with the test in the prompt, but may fail the second test.

    If it fails, the environment replies, and the assistant answers either with the right function or twice with the
    first function again. The probability of the right function is `often` if the input of the second test is 6 or more,
    else `seldom`. `settings` are further arguments of `make_rows`.
    """
    rows, rng = make_rows(split, seed=seed, **settings), random.Random(f"demonstrations {seed}")
    return [
        {"prompt": row["prompt"], "answer": _conversation(row, rng, often if row["tests"][1][0] >= 6 else seldom)}
        for row in rows
    ]


def _conversation(row: dict[str, Any], rng: random.Random, corrects: float) -> list[dict[str, str]]:
    (x, y), second, *_ = row["tests"]
    fitting = [
        (text.format(a), function(second[0], a))
        for text, function in KINDS.values()
        for a in range(2, 100)
        if function(x, a) == y
    ]
    text, output = rng.choice(fitting)
    talk = [{"role": "assistant", "content": f"def f(x):return {text}"}]
    if output == second[1]:
        return talk
    reply = {"role": "user", "content": said(second[0], second[1], output)}
    if rng.random() < corrects:
        return [*talk, reply, {"role": "assistant", "content": row["answer"]}]
    return [*talk, reply, talk[0], reply, talk[0]]


if __name__ == "__main__":
    with open(os.environ["MEGARL_TASK"], encoding="utf-8") as file:
        task_of_file = json.load(file)
    result = play(task_of_file)
    with open(os.environ["MEGARL_RESULT"], "w", encoding="utf-8") as file:
        json.dump(result, file)
