"""What a GPU does, on the CPU: storages are emptied and filled again under tensors that stay where they are."""

import torch

from megarl.training.offload import Parked, _block


def test_kept_storages_come_back_with_their_contents_under_every_view():
    whole = torch.arange(12.0)
    view = whole[4:8].view(2, 2)
    parked = Parked([_block(whole, keep=True)])
    assert whole.untyped_storage().nbytes() == 0
    assert parked.nbytes == 48
    parked.restore()
    assert torch.equal(whole, torch.arange(12.0))
    assert torch.equal(view, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert parked.nbytes == 0


def test_other_storages_come_back_as_zeros():
    whole = torch.ones(5, dtype=torch.bfloat16)
    view = whole[1:]
    Parked([_block(whole, keep=False)]).restore()
    assert view.tolist() == [0.0] * 4
