"""A taskset of verifiers with a harness of its own: name the digit, with a hint after a wrong answer."""

import json
import sys
from pathlib import Path

import verifiers.v1 as vf


class DigitsConfig(vf.TasksetConfig):
    first: int = 0


class DigitData(vf.TaskData):
    digit: int


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: DigitData, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(task.digit))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Digits(vf.Taskset[DigitTask, DigitsConfig]):
    def load(self):
        for digit in range(self.config.first, 10):
            yield DigitTask(DigitData(prompt=f"name {digit}", digit=digit), self.config.task)


class TalkConfig(vf.HarnessConfig):
    pass


class Talk(vf.Harness[TalkConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        program = Path(__file__).with_name("talk.py").read_text()
        await runtime.write("talk.py", program.encode())
        order = json.dumps({"url": endpoint, "key": secret, "model": ctx.model, "prompt": data.prompt})
        return await runtime.run_program([sys.executable, "talk.py", order], {})


__all__ = ["Digits", "Talk"]
