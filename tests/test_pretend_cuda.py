"""The pretended GPU refuses, counts and replays what a GPU does."""

import pytest
import torch

from tests.dist import run_pretending


def rules() -> dict:
    from tests.pretend_cuda import SEEN, Pretend

    found: dict = {}
    with Pretend():
        here, there = torch.ones(3), torch.arange(3, device="cuda")
        for name, call in {
            "add": lambda: here + there,
            "cpu indexed by cuda": lambda: here[there],
            "numpy": lambda: there.numpy(),
        }.items():
            with pytest.raises((RuntimeError, TypeError)) as caught:
                call()
            found[name] = str(caught.value)
        found["devices"] = [str(x.device) for x in (there * 2, there + here.sum(), there[here.long()], there.cpu())]
        SEEN.clear()
        there.sum().item(), there.nonzero(), there[there > 0], there.tolist(), torch.ones(2).to("cuda")
        found["waits"] = sum(SEEN.waits.values())
        x = torch.ones(3, requires_grad=True)
        (x.to("cuda") * 2).sum().backward()
        found["gradient"] = x.grad.tolist()
        module = torch.nn.Linear(2, 2).to("cuda")
        found["module"] = sorted({str(p.device) for p in module.parameters()})
    return found


def graph() -> dict:
    from tests.pretend_cuda import Pretend

    with Pretend():
        x = torch.zeros(3, device="cuda")
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            y = x * 2 + 1
            x += 1
        captured = x.tolist()
        results = []
        for _ in range(2):
            made.replay()
            results.append(y.tolist())
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()
    return {"captured": captured, "results": results, "x": x.tolist()}


@pytest.mark.procs
def test_host_and_device_do_not_meet_and_waits_are_counted():
    (found,) = run_pretending(rules, 1, 120)
    assert "same device" in found["add"]
    assert "same device" in found["cpu indexed by cuda"]
    assert "numpy" in found["numpy"]
    assert found["devices"] == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert found["waits"] == 5
    assert found["gradient"] == [2.0, 2.0, 2.0]
    assert found["module"] == ["cuda:0"]


@pytest.mark.procs
def test_a_capture_changes_nothing_and_a_replay_runs_on_the_same_memory():
    (found,) = run_pretending(graph, 1, 120)
    assert found["captured"] == [0.0, 0.0, 0.0]
    assert found["results"] == [[1.0] * 3, [3.0] * 3]
    assert found["x"] == [2.0] * 3
