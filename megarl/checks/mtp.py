"""Checks of the training of a draft head (`actor.mtp`)."""

from __future__ import annotations

from megarl.artifacts.checkpoint_files import read_config, refuse_own_embeddings, split_draft, weight_files
from megarl.artifacts.draft_training import draft_problem
from megarl.artifacts.facts import ModelFacts, local_folder
from megarl.checks.checklist import Checklist
from megarl.checks.weights import read_header
from megarl.config.run import RunConfig


def check_mtp(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the model and the layout allow training of the draft head, and that local files have one."""
    if config.actor.mtp is None or facts is None:
        return
    problem = draft_problem(config, facts)
    checks.from_error(problem)
    if problem is None:
        size = f"{facts.draft_parameters:,} parameters, not counted in the policy's parameters above"
        checks.ok(f"trains a draft head of {size}")
    folder = None if config.model.path is None else local_folder(config.model.path)
    if problem is not None or folder is None or not any(folder.glob("*.safetensors")):
        return
    raw = read_config(folder)
    with checks.recorded():
        refuse_own_embeddings(raw, str(folder / "config.json"))
        if not split_draft(raw, [name for file in weight_files(folder, raw) for name in read_header(file)])[1]:
            checks.fail(
                "actor.mtp",
                "the model's files have no draft head",
                found=str(folder),
                allowed="files with the tensors of multi-token prediction",
                fix="use files with them, or remove actor.mtp",
            )
