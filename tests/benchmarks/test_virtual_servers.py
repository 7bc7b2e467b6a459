"""The client on servers in virtual time."""

from __future__ import annotations

import pytest

from megarl.benchmarks.virtual_servers import generate, generate_in_shares


def test_the_client_finishes_every_sample_and_fills_the_servers():
    outcome = generate(servers=4, samples=400, group=4, capacity=8)
    assert outcome.virtual_s < 2.0 * outcome.floor_s
    assert outcome.fullest < 1.5


def test_clients_with_servers_of_their_own_generate_the_same_samples():
    one, shares = generate(4, 200, 4, 8), generate_in_shares(4, 200, 4, 8, clients=2)
    assert (shares.mean_tokens, shares.longest_s, shares.floor_s) == (one.mean_tokens, one.longest_s, one.floor_s)
    assert shares.virtual_s >= one.floor_s


@pytest.mark.campaign("servers")
def test_a_hundred_thousand_samples_on_256_servers():
    """0.2 CPU-ms a sample; the bound finds what grows with the number of waiting samples."""
    few, many = (generate(servers=256, samples=samples, group=16, capacity=128) for samples in (50_000, 100_000))
    assert many.cpu_s < 4 * few.cpu_s
    assert many.virtual_s < 1.5 * many.floor_s
