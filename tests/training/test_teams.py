"""Two teams of one job: engines of different layouts train at the same time, to the bit what each trains apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megarl.config.model import ParallelConfig
from megarl.system.processes import free_port
from tests.dist import fresh_layout, join_team, no_parallel, run_distributed, world
from tests.training import cases

TEAMS = {"left": (0, 1), "right": (2, 3)}
ENGINES: dict[str, tuple[str, dict]] = {"left": ("dense", {"tp": 2, "sp": True}), "right": ("moe", {})}
STEPS = 2


def _train(name: str, meet: Callable[[str], None]) -> dict:
    """Metrics and parameters of this rank after a few steps; `meet` is called in the middle of each."""
    model, sizes = ENGINES[name]
    parallel = ParallelConfig(**sizes)
    layout = fresh_layout(parallel)
    engine = cases.make_engine(model, parallel, layout=layout)
    steps = []
    for step in range(STEPS):

        def loss(*args, step=step):
            meet(f"loss of step {step}")
            return cases.loss_fn(*args)

        batch = cases.split_over(cases.make_batch(seed=step), layout.dp_rank, layout.dp_size)
        steps.append(engine.train_step(batch, loss).result())
    weights = [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]
    place = [layout.world_size, layout.rank, layout.tp_rank, layout.dp_rank, *layout.world.ranks]
    return {"steps": steps, "weights": dict(enumerate(weights)), "place": place}


def _together(ports: dict[str, int], run_dir: str) -> dict:
    """Every rank joins its team and trains; in the middle of a step it waits until all four are in the same step."""
    rank = dist.get_rank()
    name = join_team(TEAMS, ports, Path(run_dir))
    store = dist.TCPStore("127.0.0.1", ports["left"], is_master=False)

    def meet(what: str) -> None:
        store.set(f"{what} of rank {rank}", "here")
        store.wait([f"{what} of rank {other}" for other in range(4)])

    found = _train(name, meet)
    store.set(f"end of rank {rank}", "here")
    if rank == 0:  # it holds the store
        store.wait([f"end of rank {other}" for other in range(4)])
    return found


def _apart(name: str) -> dict:
    return _train(name, lambda what: None)


@pytest.mark.procs
def test_two_teams_train_at_the_same_time_what_each_trains_apart(tmp_path):
    together = run_distributed(_together, 4, 240, {name: free_port() for name in TEAMS}, str(tmp_path))
    for name, ranks in TEAMS.items():
        apart = run_distributed(_apart, 2, 240, name)
        for rank, want in zip(ranks, apart, strict=True):
            found = together[rank]
            assert found["place"] == want["place"]
            assert found["steps"] == want["steps"]
            assert found["weights"].keys() == want["weights"].keys()
            for number, weight in found["weights"].items():
                assert torch.equal(weight, want["weights"][number])
    assert [found["place"][2:4] for found in together] == [[0, 0], [1, 0], [0, 0], [0, 1]]


def test_a_closed_layout_leaves_no_group_and_lets_another_follow():
    from megarl.training.parallel import init_parallel

    everyone = world()
    no_parallel()
    before = set(_world.pg_map)
    layout = fresh_layout(ParallelConfig())
    made = set(_world.pg_map) - before
    assert layout.world.process_group in before
    assert layout.mp_group.process_group in made
    with pytest.raises(RuntimeError, match="cannot create a second layout"):
        init_parallel(ParallelConfig(), everyone)
    no_parallel()
    assert set(_world.pg_map) == before
    assert fresh_layout(ParallelConfig()).world_size == 1
