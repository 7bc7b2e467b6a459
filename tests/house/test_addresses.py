"""Addresses of this machine."""

import pytest

from megarl.system.processes import address_towards, is_address_here, is_every_interface


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_is_reached_from_loopback(host: str) -> None:
    if not is_address_here(host):
        pytest.skip(f"this machine has no interface {host}")
    assert address_towards(host) == host


def test_a_name_without_an_address_is_an_os_error() -> None:
    with pytest.raises(OSError):
        address_towards("no.such.host.invalid")


@pytest.mark.parametrize(("host", "here"), [("127.0.0.1", True), ("192.0.2.1", False), ("10..0.1", False)])
def test_addresses_of_this_machine_are_known(host: str, here: bool) -> None:
    assert is_address_here(host) == here


@pytest.mark.parametrize(
    ("address", "every"),
    [
        *(
            (address, True)
            for address in ("0.0.0.0", "::", "*", "", "0", "0x0", "0.0", "::0", "::ffff:0.0.0.0", "::%lo")
        ),
        *((address, False) for address in ("127.0.0.1", "10.1", "::1", "::ffff:10.0.0.1", "localhost", "0.example")),
    ],
)
def test_addresses_of_every_interface_are_known_in_any_spelling(address: str, every: bool) -> None:
    assert is_every_interface(address) == every
