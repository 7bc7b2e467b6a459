"""Which team walks a node."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.dag.node import Node
from megarl.dag.stage import ROLES, Role
from megarl.errors import ConfigError


def team_of(node: Node, owner: Mapping[Role, str]) -> str:
    """The team that walks `node`; of the roles without a model the scorer is where samples are drawn."""
    named = [role for role in (node.role, *(ROLES[name] for name in node.needs_roles)) if role in owner]
    if node.role in owner:
        home = owner[node.role]
    elif node.role is Role.REWARD or "scorer" in node.needs_roles:
        home = owner[Role.ROLLOUT]
    else:
        home = owner[named[0]] if named else owner[Role.ACTOR]
    away = [role for role in named if owner[role] != home]
    if away or ("scorer" in node.needs_roles and home != owner[Role.ROLLOUT]):
        roles = list(dict.fromkeys(role.value for role in named)) or [node.role.value]
        raise ConfigError(
            f"node {node.id!r} works with the {' and the '.join(roles)}"
            + (" and with what scores samples, which is where they are drawn" if "scorer" in node.needs_roles else ""),
            where="placement.teams",
            found=", ".join(f"{role} in {owner[Role(role)]}" for role in roles if Role(role) in owner),
            fix="put these roles into one team",
        )
    return home
