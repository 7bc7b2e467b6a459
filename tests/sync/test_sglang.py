"""Synchronisation with the real SGLang server: every transport, checksums of all tensors, and no stale prefix cache."""

import contextlib
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.config.sglang import SGLangConfig
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.probe import greedy_probe
from megarl.system.compat.sglang import find_python
from megarl.system.errors import ConfigError, ServerError
from tests.dist import fresh_parallel, run_distributed
from tests.models.tiny import build_tiny, save_tiny
from tests.rollout.forked import forked_servers
from tests.sync.receivers import weight_sync

KEY = "-a key of the test"
PARAMETERS = 35  # of the server: 8 in each of 4 layers, embedding, norm, head
PROMPT = [5, 17, 99, 4, 42, 7, 7, 88, 120, 3] * 8  # long enough to be kept in the prefix cache
TRANSPORTS = ("tensor", "distributed", "disk", "delta")

try:
    find_python(None, cuda=False)
    MISSING = ""
except ConfigError as error:
    MISSING = str(error)
pytestmark = [
    *(pytest.mark.procs, pytest.mark.servers),
    pytest.mark.skipif(bool(MISSING), reason=f"no SGLang to test with: {MISSING}"),
]


@contextlib.contextmanager
def serving(
    folder: Path,
    name: Any,
    dtype: str = "float32",
    tp_size: int = 1,
    attention_dp: int = 1,
    arguments: Sequence[str] = (),
    **changes,
):
    """Address of a server that was started with a tiny model, saved in folder/model, or with transformers' `name`."""
    from megarl.rollout.sglang.server import ServerProcess, ServerSpec, health

    if isinstance(name, str):
        model = save_tiny(folder / "model", name, **changes)
    else:
        (model := name).save_pretrained(folder / "model")
    write_metadata(folder / "model", model.config, None, torch.float32)  # with the keys that only servers read
    layout = {"tp_size": tp_size, "attention_dp": attention_dp, "extra_args": list(arguments)}
    config = SGLangConfig(max_total_tokens=4096, context_length=128, **layout)
    spec = ServerSpec(0, config, folder / "model", dtype, "127.0.0.1", KEY, folder, cuda=False)
    server = ServerProcess(spec)
    with forked_servers():
        server.start()
    try:
        end = time.monotonic() + 300
        while why := health(server.api, end):
            server.check()
            assert time.monotonic() < end, why
            time.sleep(0.5)
        yield server.api.url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Folder of a model and the address of a server that was started with it."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "qwen3", tie_word_embeddings=False) as url:
        yield folder, url


def negate_head(chunks) -> None:
    """The likeliest token becomes the unlikeliest."""
    with torch.no_grad():
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer.weight.neg_()


def push_both(folder: str, url: str, run_dir: str, transport: str, first: int, negated: list[bool]) -> list[dict]:
    """Push versions `first`, `first + 1`, ... with the head negated or not; reports as data."""
    import dataclasses

    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.fleet import Fleet, Server

    fresh_parallel(tp=2)
    chunks = build_tiny(folder, tp=2)
    fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig())
    config = SyncConfig(transport=transport, verify="every", timeout_s=60.0, bucket_mb=5)
    sync = weight_sync(chunks, fleet, config, run_dir)
    found, now = [], False
    for version, wanted in enumerate(negated, first):
        if wanted != now:
            negate_head(chunks)
        now = wanted
        found.append(dataclasses.asdict(sync.push(version)) | {"state": fleet.servers[0].state})
    sync.close()
    return found


def oracle(folder: Path, token_ids: list[int], *, negated: bool) -> tuple[list[int], list[float]]:
    """Greedy choice at each place, and log-probs of `token_ids`, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if negated:
        model.lm_head.weight.data.neg_()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logps = logits.log_softmax(-1)
    return logits.argmax(-1).tolist(), logps.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def assert_answers(api: ServerApi, folder: Path, version: int | str, *, negated: bool) -> list[int]:
    probe = greedy_probe(api, PROMPT, 8, 60.0)
    choice, logps = oracle(folder, probe.token_ids, negated=negated)
    assert probe.version.partition("@")[0] == str(version)  # the rest is the name of the run
    assert probe.token_ids == choice
    # fp32 on both sides, other kernels: 1e-4 is some hundred units in the last place of a log-prob around 5
    torch.testing.assert_close(torch.tensor(probe.logprobs), torch.tensor(logps), atol=1e-4, rtol=0)
    return probe.token_ids


def test_all_transports_with_checksums_and_fresh_answers(served):
    folder, url = served
    api = ServerApi(url, KEY, "server 0")
    before = greedy_probe(api, PROMPT, 8, 60.0)
    assert before.token_ids == oracle(folder / "model", before.token_ids, negated=False)[0]
    for number, transport in enumerate(TRANSPORTS):
        flips = [number % 2 == 1, number % 2 == 0]  # every transport ends with other weights than the one before it
        run = (str(folder / "model"), url, str(folder), transport, 10 * number, flips)
        for reports in run_distributed(push_both, 2, 240, *run):
            assert [report["updated"] for report in reports] == [[0], [0]], transport
            assert all(report["verified"] == PARAMETERS and report["state"] == "current" for report in reports)
        answer = assert_answers(api, folder / "model", 10 * number + 1, negated=flips[1])
        assert (answer == before.token_ids) is not flips[1]


def push_parts(folder: str, url: str, run_dir: str, first: int, tp: int, dtype: str) -> list[dict]:
    """Everything, then one element in fifty of every tensor, twice, then nothing, as deltas to a server of `tp` ranks.

    Every tensor is a bucket of its own: the relay uses the memory that it hands over again and again.
    """
    import dataclasses

    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.fleet import Fleet, Server

    fresh_parallel()
    chunks = build_tiny(folder)
    fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig())
    config = SyncConfig(transport="delta", verify="every", timeout_s=60.0, bucket_mb=4, dtype=dtype)
    sync = weight_sync(chunks, fleet, config, run_dir, tp=tp)
    found = [dataclasses.asdict(sync.push(first))]
    for version in (1, 2, 3):
        with torch.no_grad():
            for param in chunks[0].parameters() if version < 3 else ():
                param.view(-1)[version::50] += 0.05
        found.append(dataclasses.asdict(sync.push(first + version)))
    sync.close()
    return found


def assert_patched(folder: Path, url: str, first: int, tp: int = 1, dtype: str = "fp32", parameters=PARAMETERS) -> None:
    log = folder / "server_0.log"
    loads = log.read_text().count("/update_weights_from_tensor")
    (reports,) = run_distributed(push_parts, 1, 240, str(folder / "model"), url, str(folder), first, tp, dtype)
    assert [report["updated"] for report in reports] == [[0]] * 4
    assert all(report["verified"] == tp * parameters for report in reports)
    whole, some, more, none = (report["nbytes"] for report in reports)
    assert 0 < none < 1000 < some == more < whole / 20  # five bytes of every two hundred, three of every hundred
    buckets = none // 8
    assert log.read_text().count("/update_weights_from_tensor") == loads + 3 * buckets
    assert "a weight update failed" not in log.read_text()


def test_a_server_writes_changed_elements_itself(served):
    assert_patched(*served, first=60)


def test_a_checksum_that_differs_stops_the_run(served):
    folder, url = served
    with pytest.raises(AssertionError, match=r"parameters differ from the trainer's: model\.norm\.weight"):
        run_distributed(push_wrong, 1, 120, str(folder / "model"), url, str(folder))
    assert cpu_seconds_in(2.0) < 1.0, "a server that stays paused waits and does not ask again and again"


def cpu_seconds_in(seconds: float) -> float:
    """CPU time that the servers of this process use in so many seconds."""

    def used() -> float:
        servers = psutil.Process().children(recursive=True)
        return sum(sum(server.cpu_times()[:2]) for server in servers if "forker.py" in " ".join(server.cmdline()))

    before = used()
    time.sleep(seconds)
    return used() - before


def push_wrong(folder: str, url: str, run_dir: str) -> None:
    """The buckets hold one wrong element."""
    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.fleet import Fleet, Server

    fresh_parallel()
    chunks = build_tiny(folder)
    fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig())
    config = SyncConfig(transport="tensor", timeout_s=60.0)
    sync = weight_sync(chunks, fleet, config, run_dir)
    held = sync.sender.source.held = dict(sync.sender.source.held)
    key = next(key for key in held if key[0] == "model.norm.weight")
    held[key] = held[key].clone()
    held[key][3] += 1
    sync.push(100)


def push_scaled(
    folder: str, url: str, run_dir: str, cases: list[tuple[dict, dict]], tp: int = 1, first: int = 1, groups: int = 1
) -> list[dict]:
    """For each (layout, settings): push parameters that the server did not hold before, to one of `tp` ranks in so many
    attention groups.

    They are scaled by the number of the case, from `first` on.
    """
    import dataclasses

    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.fleet import Fleet, Server

    found = []
    for number, (layout, settings) in enumerate(cases, first):
        fresh_parallel(**layout)
        chunks = build_tiny(folder, **layout)
        with torch.no_grad():
            for chunk in chunks:
                for param in chunk.parameters():
                    param.mul_(1 + number / 7)
        colocated = settings.get("transport") == PROXIED
        fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig(colocated=colocated))
        changes = {"transport": "shards"} if colocated else {}
        config = SyncConfig(**{"transport": "tensor", "verify": "every", "timeout_s": 60.0, **settings, **changes})
        sync = weight_sync(chunks, fleet, config, run_dir, tp, groups)
        found.append(dataclasses.asdict(sync.push(number)))
        sync.close()
    return found


#: Latent attention and shared experts; transformers' norms of latents ignore any other `rms_norm_eps`.
NARROW = {"moe_intermediate_size": 64, "n_shared_experts": 1, "rms_norm_eps": 1e-6, "first_k_dense_replace": 1}
PROXIED = "shards, as on the trainer's GPUs"
PP2, VPP2, TP2_PP2 = {"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}


def assert_all_verified(
    run_dir: Path, url: str, runs: list[tuple[int, list]], tp: int, parameters: int, groups: int = 1
) -> None:
    """Push from trainers of these (processes, cases), one after the other, to one server of `tp` ranks."""
    first = 1
    for processes, cases in runs:
        run = (str(run_dir / "model"), url, str(run_dir), cases, tp, first, groups)
        for reports in run_distributed(push_scaled, processes, 240, *run):
            for case, report in zip(cases, reports, strict=True):
                assert (report["failed"], report["updated"], report["verified"]) == ({}, [0], tp * parameters), case
        first += len(cases)


@pytest.mark.parametrize(
    ("name", "changes", "layouts", "parameters"),
    [
        # 128 and 64: on a CPU the server pads the widths of MLPs and experts to multiples of 32
        ("deepseek_v3", {**NARROW, "intermediate_size": 128}, {2: [{"ep": 2}]}, 55),
        *(
            pytest.param(*case, marks=pytest.mark.campaign("servers"))
            for case in (
                ("qwen3_moe", {"moe_intermediate_size": 64}, {2: [{"ep": 2}]}, 39),
                ("qwen2", {"tie_word_embeddings": True}, {2: [VPP2]}, 30),
                ("llama", {}, {2: [PP2, VPP2]}, 27),
                ("olmo2", {}, {2: [{"tp": 2}, PP2]}, 43),
                ("deepseek_v3", {**NARROW, "q_lora_rank": None}, {2: [{"tp": 2}, PP2], 4: [TP2_PP2]}, 51),
                ("glm4_moe_lite", {**NARROW, "q_lora_rank": 24}, {2: [{"tp": 2}, PP2]}, 55),
                ("glm4_moe", NARROW, {2: [{"tp": 2}, PP2, {"ep": 2}]}, 51),
            )
        ),
    ],
)
def test_other_architectures_and_layouts(tmp_path, name, changes, layouts, parameters):
    runs = [
        (processes, [(layout, {"transport": way}) for layout in several for way in ("tensor", "shards")])
        for processes, several in layouts.items()
    ]
    with serving(tmp_path, name, **changes) as url:
        answer = greedy_probe(ServerApi(url, KEY, "server 0"), PROMPT, 8, 60.0)
        choice, logps = oracle(tmp_path / "model", answer.token_ids, negated=False)
        assert answer.token_ids == choice
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(logps), atol=1e-4, rtol=0)
        assert_all_verified(tmp_path, url, runs, 1, parameters)


#: Layouts and transports by the number of the trainer's processes.
HALVES = {2: [({"tp": 2}, "tensor"), (PP2, "distributed"), ({"tp": 2}, "shards"), (PP2, PROXIED)]}
BOTH = {4: [(TP2_PP2, "tensor"), (TP2_PP2, "distributed"), (TP2_PP2, "shards"), (TP2_PP2, PROXIED)]}
ONE = {2: [({"tp": 2}, "tensor"), (PP2, "distributed"), (VPP2, "tensor")], **BOTH}
EVERY = {
    2: [(layout, way) for layout in ({"tp": 2}, PP2, VPP2) for way in ("tensor", "distributed", "shards", PROXIED)],
    **BOTH,
}


@pytest.mark.parametrize(
    ("name", "tied", "dtype", "wire", "parameters", "layouts"),
    [
        pytest.param("qwen3", False, "float32", "fp32", PARAMETERS, ONE, marks=pytest.mark.campaign("servers")),
        ("qwen2", True, "bfloat16", "bf16", 30, HALVES),
        pytest.param("qwen2", True, "bfloat16", "bf16", 30, EVERY, marks=pytest.mark.campaign("servers")),
    ],
)
def test_a_server_of_two_ranks_holds_every_parameter_on_both(tmp_path, name, tied, dtype, wire, parameters, layouts):
    # 128: on a CPU the server pads the width of the MLP to a multiple of 32 on each rank
    changes = {"tie_word_embeddings": tied, "intermediate_size": 128}
    runs = [
        (processes, [(layout, {"transport": transport, "dtype": wire}) for layout, transport in several])
        for processes, several in layouts.items()
    ]
    with serving(tmp_path, name, dtype, tp_size=2, **changes) as url:
        assert_all_verified(tmp_path, url, runs, 2, parameters)
        assert_patched(tmp_path, url, 60, 2, wire, parameters)


def from_group(api: ServerApi, group: int, tokens: int) -> dict[str, Any]:
    """A greedy continuation of PROMPT by a group of the server's ranks."""
    settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    payload = {"input_ids": PROMPT, "sampling_params": settings, "return_logprob": True, "routed_dp_rank": group}
    return api.call("/generate", payload, deadline_s=60.0, phase="test")


def scaled_oracle(folder: Path, factor: float) -> list[int]:
    """transformers' greedy continuation of PROMPT with all parameters times `factor`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()


def assert_groups_drop_and_abort(api: ServerApi) -> None:
    """/flush_cache fails as long as a request of the second group runs. An abort ends such a request."""

    def flush() -> str:
        try:
            api.call("/flush_cache", {}, deadline_s=60.0, phase="test")
        except ServerError as error:
            return "-" if error.status == 400 else "?"
        return "+"

    with ThreadPoolExecutor() as pool:
        running, flushed = pool.submit(from_group, api, 1, 40), ""
        while not running.done():
            flushed += flush()
        assert re.fullmatch(r"[+]*-+[+]*", flushed), flushed  # before it began, while it ran, after its end
        running = pool.submit(from_group, api, 1, 40)
        while not running.done():
            api.call("/abort_request", {"abort_all": True}, deadline_s=60.0, phase="test")
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    api.call("/flush_cache?timeout=30", deadline_s=60.0, phase="test")


MANY = {
    2: [
        *(({"tp": 2}, "tensor"), (PP2, "distributed"), ({"ep": 2}, "disk"), (PP2, "delta")),
        *(({"tp": 2}, "shards"), ({"ep": 2}, PROXIED)),
    ]
}
TIED = {2: [({"tp": 2}, "tensor"), (PP2, "delta"), ({"tp": 2}, "shards")]}


@pytest.mark.parametrize(
    ("name", "changes", "parameters", "layouts"),
    [
        ("deepseek_v3", {**NARROW, "intermediate_size": 128}, 55, {1: [({}, "tensor"), ({}, "shards")]}),
        pytest.param(
            *("deepseek_v3", {**NARROW, "intermediate_size": 128}, 55, MANY), marks=pytest.mark.campaign("servers")
        ),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 64}, 39, MANY, marks=pytest.mark.campaign("servers")),
        pytest.param(
            *("qwen3", {"tie_word_embeddings": True, "intermediate_size": 128}, 34, TIED),
            marks=pytest.mark.campaign("servers"),
        ),
        pytest.param("glm4_moe", {**NARROW, "intermediate_size": 128}, 51, MANY, marks=pytest.mark.campaign("servers")),
    ],
)
def test_groups_of_ranks_with_attention_of_their_own_hold_the_same_weights(
    tmp_path, name, changes, parameters, layouts
):
    runs = [
        (processes, [(layout, {"transport": transport}) for layout, transport in several])
        for processes, several in layouts.items()
    ]
    pushes = sum(len(cases) for _, cases in runs)
    with serving(tmp_path, name, tp_size=2, attention_dp=2, **changes) as url:
        api = ServerApi(url, KEY, "server 0")
        for number in (0, pushes):
            if number:
                assert_all_verified(tmp_path, url, runs, 2, parameters, groups=2)
            wanted = scaled_oracle(tmp_path / "model", 1 + number / 7)
            answers = [from_group(api, group, 8) for group in (0, 1)]
            assert [answer["output_ids"] for answer in answers] == [wanted, wanted]
            versions = {answer["meta_info"]["weight_version"].partition("@")[0] for answer in answers}
            assert versions == {str(number) if number else "default"}
        assert_groups_drop_and_abort(api)
