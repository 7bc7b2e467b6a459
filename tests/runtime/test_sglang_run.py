"""Whole training runs that generate on real SGLang servers, with every transport of the weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from megarl.rollout.sglang.api import ServerApi
from megarl.runtime.health import read_beat
from megarl.sync.protocol import read_tag
from megarl.system.compat.sglang import shared_memory
from megarl.system.errors import ServerError
from tests.disaggregated import test_as_ready_loop as test_flow
from tests.forked import Command
from tests.rollout.servers import KEY_NAME, need_interpreter, running_server
from tests.runtime import harness
from tests.runtime.harness import GUESSING, finish, metrics, run, start, train, wait_for, write_recipe

pytestmark = [pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(900)]
#: A rate at which the dense score moves within a few steps.
LEARNING = ("sft.steps=0", "trainer.steps=6", "trainer.save_every=0", "validation.every=0", "actor.optim.lr=1e-2")
#: On a CPU these calls free nothing, but they must be taken at the right moments all the same.
COLOCATED = ("rollout.sglang.colocated=true", "actor.engine.offload=true")
SGLANG = ("rollout.engine=sglang", "sync.verify=every", "cluster.timeout_s=400", *LEARNING)
#: Servers get the base model once, and then only the adapters; they are large enough to show from the third step on.
SEPARATE = ("model.lora={rank: 4, alpha: 64}", "sync.adapters=separate")
#: The phase of rank 0 while samples are generated.
DRAWS = "step/rollout"
#: For a machine on which a server takes minutes to start.
_BUSY_S = 600.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def external(recipe: Path) -> Iterator[tuple[str, ...]]:
    with running_server(recipe) as overrides:
        yield overrides


@pytest.fixture(scope="module")
def embedded(recipe: Path) -> dict[int, dict[str, float]]:
    """The same run on the trainer's own weights."""
    return train(recipe, recipe.parent / "embedded", *LEARNING)


def gain(steps: dict[int, dict[str, float]]) -> float:
    """Mean score of the last two training steps over that of the first two."""
    scores = [steps[step]["critic/score/mean"] for step in sorted(steps) if step > 0]
    return sum(scores[-2:]) / 2 - sum(scores[:2]) / 2


#: All of them bring every parameter to a real server in tests/sync/test_sglang.py.
OTHERS = [
    pytest.param(transport, 6, marks=pytest.mark.campaign("servers")) for transport in ("tensor", "distributed", "disk")
]


@pytest.mark.parametrize(
    ("transport", "last"), [("delta", 3), pytest.param("delta", 6, marks=pytest.mark.campaign("servers")), *OTHERS]
)
def test_every_transport_trains_like_the_embedded_engine(transport, last, recipe, external, request):
    settings = (*SGLANG, *external, f"sync.transport={transport}", f"trainer.steps={last}")
    if transport == "delta":  # in two parts: versions go on with the steps
        train(recipe, recipe.parent / f"{transport}-{last}", *settings, f"trainer.steps={last // 2}")
    steps = train(recipe, recipe.parent / f"{transport}-{last}", *settings)
    for step in range(1, last + 1):
        numbers = steps[step]
        assert numbers["sync/verified_tensors"] > 0
        assert numbers["sync/failed"] == 0
        assert numbers["rollout_corr/staleness_max"] == 0
        # Both compute in fp32 with other kernels: 4e-6 was measured, and the old weights would differ by 1e-2.
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4
    assert 0 < max(steps[step]["sync/probe_gap"] for step in range(1, last + 1)) < 1e-4  # in one step it may be 0
    if last == 6:  # it takes so many steps to show
        embedded = request.getfixturevalue("embedded")
        assert steps[1]["critic/score/mean"] == pytest.approx(embedded[1]["critic/score/mean"], abs=0.3)
        assert gain(embedded) > 0.05
        assert gain(steps) > 0.05


def test_a_server_generates_with_adapters_merged(recipe, external, tmp_path):
    """From the third step on they are large enough to show: the base model is off by more than 1e-3."""
    lora = "model.lora={rank: 4, alpha: 64}"
    steps = train(recipe, tmp_path, *SGLANG, *external, lora, "trainer.steps=3")
    for step in (1, 2, 3):
        assert steps[step]["sync/verified_tensors"] > 0
        assert steps[step]["sync/failed"] == 0
        assert steps[step]["rollout_corr/logp_diff_max"] < 1e-4
        assert steps[step]["actor/grad_norm"] > 0
    assert 0 < max(steps[step]["sync/probe_gap"] for step in (1, 2, 3)) < 1e-4  # in one step it may be 0


@pytest.mark.parametrize("parts", [(3,), pytest.param((2, 3), marks=pytest.mark.campaign("servers"), id="resumed")])
def test_a_server_gets_separate_adapters_after_its_first_update(recipe, external, tmp_path, parts):
    """Both tensor-parallel ranks hold parts of what is written; the base model goes once to each run."""
    for last in parts:
        settings = (*SGLANG, *external, *SEPARATE, "actor.parallel.tp=2", f"trainer.steps={last}")
        steps = train(recipe, tmp_path, *settings)
    sizes = load_file(tmp_path / "hf_adapter" / "adapter_model.safetensors").values()
    nbytes = sum(tensor.nbytes for tensor in sizes)
    for step in (1, 2, 3):
        assert steps[step]["sync/verified_tensors"] > len(sizes)
        assert steps[step]["sync/failed"] == 0
        assert steps[step]["rollout_corr/logp_diff_max"] < 1e-4
        assert steps[step]["rollout_corr/staleness_max"] == 0
    assert 0 < max(steps[step]["sync/probe_gap"] for step in (1, 2, 3)) < 1e-4
    for step in {2, 3} - {last + 1 for last in parts}:  # a run's first step counts its first update, too
        assert steps[step]["sync/gb"] == pytest.approx(nbytes / 1e9)
    assert sorted(folder.name for folder in (tmp_path / "sync/adapters").iterdir()) == ["v00000002", "v00000003"]
    refuse_other_values(external, tmp_path / "sync/adapters/v00000003")


def refuse_other_values(external: tuple[str, ...], folder: Path) -> None:
    """The server compares what it reads with the hashes that the trainer has written beside it."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    wrong = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[wrong] = tensors[wrong] + 1.0
    save_file(tensors, file)
    api = ServerApi(external[0].partition("[")[2].rstrip("]"), os.environ[KEY_NAME], "server 0")
    with pytest.raises(ServerError, match=rf"1 of {len(tensors)} adapter tensors differ from the trainer's: {wrong}"):
        api.call("/load_lora_adapter", {"lora_name": "9@x", "lora_path": str(folder)}, deadline_s=60, phase="test")


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(harness.ASKING, id="agent"),
        pytest.param(GUESSING, id="class", marks=pytest.mark.campaign("servers")),
    ],
)
def test_episodes_of_three_turns_are_played_on_a_server(recipe, external, tmp_path, env):
    """Two replicas that play against one server; what it drew is what the trainer computes."""
    steps = train(recipe, tmp_path, *SGLANG, *external, *env, "algorithm.kl.use=none", "trainer.steps=2")
    for step in (1, 2):
        numbers = steps[step]
        assert numbers["env/turns/max"] == 3
        assert 1 < numbers["env/turns/mean"] <= 3
        assert numbers["env/errors"] == 0
        assert 0 < numbers["env/cached"] < 1  # later turns find what came before
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4
        assert numbers["rollout_corr/staleness_max"] == 0
        assert numbers["actor/grad_norm"] > 0


#: No sample is drawn but those of training, and all of them are long enough to be stopped.
TRAINING_ONLY = ("data.val_files=[]", "validation.every=0", "rollout.sampling.ignore_eos=true")


def stop_halfway(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """Run and note; samples that step 1 does not need stop after 8 tokens until its weights interrupt them.

    Those of step 1 wait for one that has stopped, so that the weights come while it is unfinished.
    """
    from megarl.rollout.sglang.client import Dispatch

    answer, sent, stopped = Dispatch._answer, list[Any](), list[Any]()

    async def answering(self: Any, sample: Any, payload: dict[str, Any]) -> Any:
        if read_tag(self._tag)[0] > 0:
            return await answer(self, sample, payload)
        if any(sample is other for other in stopped):
            while not sample.aborted:
                await asyncio.sleep(0.01)
            return await answer(self, sample, payload)
        sent.append(sample)
        if len(sent) <= 4 * 4:  # all samples of step 1
            found = await answer(self, sample, payload)
            while not stopped:
                await asyncio.sleep(0.01)
            return found
        payload["sampling_params"]["max_new_tokens"] = 8
        found = await answer(self, sample, payload)
        found[2]["meta_info"]["finish_reason"]["type"] = "abort"  # as of a server that was interrupted
        stopped.append(sample)
        return found

    Dispatch._answer = answering  # type: ignore[method-assign]
    test_flow.noting(recipe, run_dir, overrides, teams)


@pytest.mark.parametrize(
    ("overrides", "work"),
    [
        pytest.param((), None, id="whole", marks=pytest.mark.campaign("servers")),
        pytest.param((test_flow.PARTIAL, *TRAINING_ONLY), stop_halfway, id="partial"),
        pytest.param(
            *((test_flow.PARTIAL, *TRAINING_ONLY, *SEPARATE, "sync.pause=abort"), stop_halfway),
            id="adapters",
            marks=pytest.mark.campaign("servers"),
        ),
    ],
)
def test_samples_go_to_training_as_they_get_ready_on_a_server(recipe, external, tmp_path, overrides, work):
    server = ("rollout.engine=sglang", "cluster.timeout_s=400", *external)
    numbers = test_flow.train(recipe, tmp_path, *test_flow.LONG, *server, *overrides, work=work)
    test_flow.check(tmp_path, test_flow.STEPS)
    assert all(abs(numbers[step]["rollout_corr/kl"]) < 0.5 for step in range(1, test_flow.STEPS + 1))
    samples = [sample for step in test_flow.trained(tmp_path).values() for sample in step]
    assert any(len(sample["versions"]) > 1 for sample in samples) == bool(overrides)


#: One batch of samples that takes longer than anything else in a step.
DRAWING = (
    "rollout.sampling={n: 4, max_new_tokens: 48, ignore_eos: true}",
    "actor.engine.micro_batch_tokens=256",
    "rollout.sglang.health_timeout_s=15",
)


@dataclass(frozen=True)
class OwnServer:
    """A server that a run has started, and what it may leave: all its processes, its shared memory, its folder."""

    pid: int
    family: list[psutil.Process]
    instance: str
    key: str
    temporary: Path

    def is_gone(self) -> bool:
        alive = [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return not alive and not shared_memory(self.instance) and not self.temporary.exists()


def own_servers(process: Command) -> list[OwnServer]:
    """Servers of this run that are there; those that are only just starting may miss some processes."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(child.pid) == child.pid and "serve.py" in " ".join(child.cmdline()):
                family, variables = [child, *child.children(recursive=True)], child.environ()
                instance, key = variables["MEGARL_SERVER_INSTANCE"], variables["MEGARL_SERVER_KEY"]
                found.append(OwnServer(child.pid, family, instance, key, Path(variables["TMPDIR"])))
    return found


def stop_scheduler(process: Command, run_dir: Path, step: int, phase: str) -> OwnServer:
    """Stop the scheduler of the run's first server from `step` on, as soon as rank 0 is in `phase`; the server."""
    began = time.time()

    def phase_from(first: int) -> str:
        now = read_beat(run_dir, 0)
        if now is None or now.time < began or now.step < first:  # it may be that of a run that was killed
            return ""
        return now.phase if phase != DRAWS or time.time() - now.time > 0.1 else ""  # drawing is all that takes so long

    wait_for(lambda: phase_from(step - 1), process, _BUSY_S, 0.1)  # a server starts until then
    server = min(own_servers(process), key=lambda server: server.pid)
    (scheduler,) = (one for one in server.family if one.cmdline()[0].startswith("sglang::scheduler"))
    wait_for(lambda: f"/{phase_from(step)}/".endswith(f"/{phase}/"), process, _BUSY_S)
    scheduler.suspend()
    return server


def check_replaced(run_dir: Path, output: str, last: int, phase: str = DRAWS) -> dict[int, dict[str, float]]:
    """Metrics of a run whose server hung in its second step and was replaced, and which went on until step `last`."""
    assert output.count("server 0 has failed and was killed; restart 1 of 3 follows") == 1
    steps = metrics(run_dir)
    assert max(steps[step]["rollout/servers_replaced"] for step in range(1, last + 1)) == 1
    for step in range(1, last + 1):
        assert steps[step]["rollout_corr/logp_diff_max"] < 1e-4  # the new one was started with random weights
        assert steps[step]["rollout_corr/staleness_max"] == 0
        if phase == DRAWS or step != 2:  # elsewhere the step may end before another server has its weights
            assert steps[step]["sync/verified_tensors"] > 0
            assert 0 < steps[step]["sync/probe_gap"] < 1e-4
    return steps


def test_own_server_ends_with_a_killed_run(recipe):
    """Even if its process hangs. This server is not forked, so its command line is that of every run.

    Servers that give no sign of life are replaced in tests/rollout/test_sglang_replace.py, in runs in the campaign.
    """
    need_interpreter()
    run_dir = recipe.parent / "own"
    process = start(recipe, run_dir, *SGLANG, *COLOCATED, "actor.parallel.tp=2", "trainer.steps=1000")
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").is_file() and 2 in metrics(run_dir), process, _BUSY_S, 0.1)
        (server,) = own_servers(process)
        assert len(server.family) > 2
        assert all(server.key not in " ".join(one.cmdline()) for one in server.family)
        psutil.Process(server.pid).suspend()
    finally:
        process.kill()  # nobody gets to tidy up
        process.communicate()
    _, alive = psutil.wait_procs(server.family, timeout=60)
    assert not alive
    log = (run_dir / "servers" / "server_0.log").read_text()
    assert "POST /release_memory_occupation" in log
    assert "POST /resume_memory_occupation" in log
    steps = metrics(run_dir)
    for step in (1, 2):
        assert steps[step]["rollout_corr/logp_diff_max"] < 1e-4  # the server was started with random weights
        assert steps[step]["rollout_corr/staleness_max"] == steps[step]["rollout/servers_replaced"] == 0
        assert steps[step]["sync/verified_tensors"] > 0
        assert 0 < steps[step]["sync/probe_gap"] < 1e-4


@pytest.mark.campaign("servers")
@pytest.mark.parametrize(
    ("phase", "servers", "more"),
    [
        *((phase, servers, ()) for phase in (DRAWS, "weight_sync", "probe", "residency") for servers in (1, 2)),
        pytest.param(DRAWS, 2, SEPARATE, id="adapters"),
    ],
)
def test_a_server_that_hangs_in_any_phase_is_replaced(recipe, tmp_path, phase, servers, more):
    need_interpreter()
    settings = (*SGLANG, *COLOCATED, *DRAWING, *more, "actor.parallel.tp=2", f"rollout.sglang.servers={servers}")
    began = time.monotonic()
    patience = ("rollout.sglang.health_timeout_s=40", "sync.timeout_s=60")  # a busy machine must not look like a hang
    process = start(recipe, tmp_path, *settings, *patience, "trainer.steps=3")
    try:
        hung = stop_scheduler(process, tmp_path, 2, phase)
        wait_for(lambda: (tmp_path / "metrics.jsonl").is_file() and 2 in metrics(tmp_path), process, _BUSY_S, 0.1)
        others = own_servers(process)
        output = finish(process, _BUSY_S)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    assert [server for server in (hung, *others) if not server.is_gone()] == []
    check_replaced(tmp_path, output, 3, phase)
    why = [line for line in output.splitlines() if "has failed and was killed" in line]
    print(f"{phase}, {servers} servers: {time.monotonic() - began:.0f} s in all; {why}")


@pytest.mark.campaign("agents")
def test_clients_of_programs_wait_while_a_killed_server_is_replaced(recipe, tmp_path):
    """kill -9 of all processes of the run's only server while programs play: each call has one answer."""
    need_interpreter()
    slow = harness.ASKING[0].replace("asks_thrice", "asks_slowly").replace("timeout_s: 60", "timeout_s: 600")
    more = ("algorithm.kl.use=none", "trainer.steps=3", "cluster.nproc=1", "cluster.timeout_s=1500")
    process = start(recipe, tmp_path, *SGLANG, *harness.ASKING[1:], slow, *more)
    try:
        killed = stop_scheduler(process, tmp_path, 2, DRAWS)
        for member in killed.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        output = finish(process, _BUSY_S)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    steps = check_replaced(tmp_path, output, 3)
    for step in (1, 2, 3):
        assert (steps[step]["env/calls"], steps[step]["env/errors"], steps[step]["env/undelivered"]) == (3, 0, 0)
        assert steps[step].get("env/retries", 0) == 0


#: The quickstart of images with the patches that SGLang takes: 2 x 2 features of 28 pixels.
SHAPES = (
    *("model.hf_config.vision_config.patch_size=14", "model.hf_config.vision_config.window_size=56"),
    *("data.min_pixels=3136", "data.max_pixels=3136", "sft.steps=60", "trainer.steps=20", "trainer.save_every=0"),
    *("validation.every=0", "rollout.engine=sglang", "sync.verify=every", "cluster.timeout_s=400"),
)


@pytest.mark.campaign("servers")
def test_a_vision_language_model_learns_from_images_that_a_server_sees(tmp_path):
    need_interpreter()
    recipe = Path(__file__).parents[2] / "recipes/grpo_shapes_quickstart.yaml"
    steps = run(recipe, tmp_path, *SHAPES)
    for step in range(1, 21):
        numbers = steps[step]
        assert numbers["sync/verified_tensors"] > 0
        # fp32 with other kernels: 4e-6 was measured.
        assert numbers["rollout_corr/logp_diff_max"] < 1e-4
        assert numbers["rollout_corr/staleness_max"] == 0
        assert numbers["actor/grad_norm"] > 0
