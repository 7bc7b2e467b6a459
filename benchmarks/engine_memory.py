"""Memory of a rank at real size, by formulas and by the engine itself on fake tensors, side by side.

    python -m megarl.benchmarks.engine_memory                   # four models, 8 to 512 GPUs that need not be there
    python -m megarl.benchmarks.engine_memory --case 8B --json FILE

Takes minutes of one core, most of them for the experts of the mixtures, and no memory to speak of.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.benchmarks.fake_engine import FakeCase, measure

STATE = ("parameters", "gradients", "optimizer")


def real_cases() -> list[FakeCase]:
    """Return the cases: 8B as its recipe says, the others with layouts of 32 to 512 GPUs of 80 GB."""
    from megarl import artifacts

    known = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text(encoding="utf-8"))

    def case(name: str, model: str, world: int, lengths: list[int], engine: dict[str, Any], **layout: Any) -> FakeCase:
        return FakeCase(name, known[model], world, lengths, prompt=512, parallel=layout, engine=engine)

    full, kept = {"micro_batch_tokens": 16384, "recompute": "full"}, {"micro_batch_tokens": 8192}
    return [
        case("8B", "Qwen/Qwen3-8B", 8, [1536] * 5, kept, tp=2, sp=True),
        case("30B-A3B", "Qwen/Qwen3-30B-A3B", 32, [1536] * 30, full, tp=4, pp=2, ep=8),
        case("70B", "meta-llama/Llama-3.1-70B", 64, [4096] * 16, kept, tp=8, pp=4, sp=True),
        case("235B-A22B", "Qwen/Qwen3-235B-A22B", 512, [4096] * 8, kept | {"recompute": "full"}, tp=4, pp=2, ep=32),
    ]


def formulas(case: FakeCase) -> dict[str, float]:
    """Return the planner's numbers for a case: the keys of `measure` that both have."""
    from megarl.artifacts.facts import facts_from_config
    from megarl.config.model import ParallelConfig
    from megarl.config.training import EngineConfig
    from megarl.planning.activations import Activations, Passes
    from megarl.planning.shards import BYTES, state_bytes

    facts, parallel = facts_from_config(case.model, case.name), ParallelConfig(**case.parallel)
    engine, longest = EngineConfig(**case.engine), max(case.lengths) - 1
    count = -(-len(case.lengths) // max(1, engine.micro_batch_tokens // longest))
    each = -(-len(case.lengths) // count)
    rows = each * (longest + 1 - case.prompt)
    passes = Passes(each * longest / parallel.cp, rows / parallel.cp, longest, count)
    element, value = BYTES[case.dtype], case.value_head
    found = Activations(facts, parallel, engine, passes, element=element, gpu=True, value_head=value)
    last = parallel.pp > 1 and case.rank * parallel.pp // case.world == parallel.pp - 1
    dp = case.world // parallel.model_parallel_size
    state = state_bytes(facts, parallel, engine, case.dtype, dp, value_head=value)
    return {**state, "update": found.needed(last=last).bytes}


def total(numbers: dict[str, Any]) -> float:
    """Return the bytes of the update's fullest moment."""
    return sum(numbers[name] for name in (*STATE, "update"))


def main() -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    given = parser.parse_args()
    table = Table("model", "GPUs", "layout", *STATE, "update", "total", "formulas", "formulas / tracker")
    kept = []
    for case in real_cases():
        if given.case and case.name not in given.case:
            continue
        seen, said = measure(case), formulas(case)
        layout = " ".join(f"{name}{'' if size is True else size}" for name, size in case.parallel.items())
        numbers = [seen[name] for name in (*STATE, "update")] + [total(seen), total(said)]
        cells = [f"{number / 1e9:.2f}" for number in numbers]
        table.add_row(case.name, str(case.world), layout, *cells, f"{total(said) / total(seen):.3f}")
        kept.append({"case": asdict(case), "tracker": seen, "formulas": said})
        if given.json is not None:
            given.json.write_text(json.dumps(kept, indent=1) + "\n")
    Console(width=140).print(table, "GB of rank 0")


if __name__ == "__main__":
    main()
