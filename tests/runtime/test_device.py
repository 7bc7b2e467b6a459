"""Which GPU a process takes."""

import pytest
import torch

from megarl.system.device import device, gpu_name, refuse_shared_gpu
from megarl.system.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    def show(visible: int, local_rank: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return show


def test_every_process_has_a_gpu_of_its_own(gpus):
    gpus(4, 3)
    assert device() == torch.device("cuda", 3)
    gpus(4, 4)
    with pytest.raises(ConfigError, match=r"cluster\.nproc: process 4 of this machine has no GPU"):
        device()


def test_the_only_visible_gpu_is_the_process_s_own(gpus):
    gpus(1, 3)
    assert device() == torch.device("cuda", 0)


def test_the_gpu_of_a_process_is_called_as_in_the_list_that_shows_it(gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(4, 3)
    assert gpu_name() == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6 ,7")
    gpus(4, 2)
    assert gpu_name() == "6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab")  # as Ray shows it
    gpus(1, 2)
    assert gpu_name() == "GPU-ab"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_name() == ""


def test_two_ranks_on_one_gpu_are_refused():
    refuse_shared_gpu(["a/GPU-1", "a/GPU-2", "b/GPU-1"])
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 have the same GPU, a/GPU-2") as caught:
        refuse_shared_gpu(["a/GPU-1", "a/GPU-2", "b/GPU-1", "a/GPU-2"])
    assert caught.value.fix.startswith("set cluster.nproc=3")
