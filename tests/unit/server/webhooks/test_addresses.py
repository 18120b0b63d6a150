from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from cotrain_server.webhooks.addresses import is_allowed

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1",
]  # fmt: skip
PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]


@pytest.mark.parametrize("address", PRIVATE)
def test_no_webhook_goes_to_a_private_address(address: str) -> None:
    assert not is_allowed(ip_address(address), [], encrypted=True)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_webhook_goes_to_a_public_address_with_encryption_alone(address: str) -> None:
    assert is_allowed(ip_address(address), [], encrypted=True)
    assert not is_allowed(ip_address(address), [], encrypted=False)


def test_the_operator_allows_networks_and_no_more() -> None:
    networks = [ip_network("10.0.0.0/8"), ip_network("::1/128")]
    for address in ("10.1.2.3", "::1", "::ffff:10.1.2.3"):
        assert is_allowed(ip_address(address), networks, encrypted=False)
    assert not is_allowed(ip_address("127.0.0.1"), networks, encrypted=True)
