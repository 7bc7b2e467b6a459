"""Where samples come from in a run of several teams: the rollout's team generates, the actor's sends it weights.

The functions of megarl/runtime/generation.py, for every team of the run: one that holds both roles does as a single
team does, others have a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.disaggregated import rollout_servers, rollout_team
from megarl.rollout.sglang.engine import SglangEngine
from megarl.runtime import generation

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState


def open_rollout(c: RankState) -> None:
    """Prepare what generates samples. Every team calls; collective over the ranks of each.

    An engine in another team than the actor's holds no usable weights before the first `publish`.
    """
    generates, trains = c.team.holds(Role.ROLLOUT), c.team.holds(Role.ACTOR)
    servers = c.config.rollout.engine == "sglang"
    if generates and trains:
        generation.open_rollout(c)
    elif generates and servers:
        key, host = rollout_servers.servers_key(c.config, c.run_dir), rollout_team.address_of_worker(c.config)
        c.fleet = generation.start_servers(c, key, host)
        c.rollout.engine = rollout_servers.pump_engine(c, c.fleet)
    elif generates:
        c.rollout.pushed = rollout_team.open_engine(c)
    elif trains and c.team.generates_elsewhere and servers:
        c.fleet = fleet = rollout_servers.connect_servers(c)
        sync = generation.send_weights_to(c, fleet)
        rollout_servers.name_run(sync.run, c.layout.world, c.mail)
        generation.show_servers(c, fleet, sync)
    elif trains and c.team.generates_elsewhere:
        c.sync = rollout_team.connect_engines(c)


def publish(c: RankState, version: int) -> None:
    """Generate with the actor's weights as they are now from here on, as `version`.

    Every team calls; collective over the ranks of each. The rollout's team waits for the weights.
    """
    generates = c.team.holds(Role.ROLLOUT)
    if generates and c.team.holds(Role.ACTOR):
        generation.publish(c, version)
    elif generates:
        _follow(c, version)
    elif c.team.leads and c.team.generates_elsewhere:
        _send(c, version)


def _send(c: RankState, version: int) -> None:
    """Send the actor's weights to the rollout's team."""
    if c.fleet is None:
        generation.account_update(c, rollout_team.push_weights(c, version))
        return
    rollout_servers.learn_of_servers(c.fleet, version, c.mail, c.team.of(Role.ROLLOUT))
    with generation.on_shared_devices(c, "publish"):
        report = c.sync.push(version)
    generation.account_update(c, report)
    rollout_servers.announce_servers(c.fleet, version, c.layout.world, c.mail)


def _follow(c: RankState, version: int) -> None:
    """Generate with `version` of the weights, which the actor's team sends."""
    trainer = c.team.of(Role.ACTOR)
    if c.fleet is not None:
        engine = c.rollout.engine
        assert isinstance(engine, SglangEngine)
        rollout_servers.follow_servers(engine, c.fleet, version, c.mail, c.layout.world, trainer)
        generation.record_servers(c, c.fleet, engine)
    else:
        assert c.rollout.pushed is not None, "`open_rollout` comes first"
        rollout_team.follow_weights(c.rollout.pushed, version, c.mail, trainer)
