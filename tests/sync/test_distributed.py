"""A collective whose other side does not come, as nccl leaves it: it neither ends nor fails."""

import threading

import pytest
import torch

from megarl.errors import ServerError
from megarl.rollout.sglang.api import ServerApi
from megarl.sync.plan import Place, ServerLayout, holdings, make_plan
from megarl.sync.transports.base import Target
from megarl.sync.transports.distributed import DistributedTransport
from tests.sync.layouts import config, trainer


class Willing(ServerApi):
    """Every call succeeds at once."""

    def call(self, *args, **settings):
        return {}


@pytest.mark.timeout(60)
def test_a_collective_that_never_ends_is_given_up():
    plan = make_plan(holdings(config("qwen3"), trainer()), [Place()], [ServerLayout()])
    transport = DistributedTransport(plan, torch.device("cpu"), 0.2)
    target = Target(0, Willing("http://127.0.0.1:1", None, "server 0"))
    with pytest.raises(ServerError, match=r"server 0 .*bucket: the trainer's part was not done within 0\.2 s"):
        transport._beside(target, "bucket", "/path", {}, threading.Event().wait)
