"""A collective whose other side does not come, as nccl leaves it: it neither ends nor fails."""

import threading

import pytest
import torch

from megarl.rollout.sglang.api import ServerApi
from megarl.sync.receiver import UpdateStep
from megarl.sync.transports.distributed import DistributedTransport
from megarl.system.errors import ServerError
from tests.sync.receivers import server_receiver


@pytest.mark.timeout(60)
def test_a_collective_that_never_ends_is_given_up():
    transport = DistributedTransport(torch.device("cpu"), 0.2)
    receiver = server_receiver(ServerApi("http://127.0.0.1:1", None, "server 0"))
    with pytest.raises(ServerError, match=r"server 0 .*bucket: the trainer's part was not done within 0\.2 s"):
        transport._call_beside(receiver, UpdateStep("bucket", 0.2), lambda: None, threading.Event().wait)
