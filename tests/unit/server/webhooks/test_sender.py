"""Signature of a webhook, and the addresses that it may be sent to."""

import time
from ipaddress import ip_address, ip_network

import pytest

from cotrain_server.webhooks.sender import is_allowed, signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
BODY = b'{"test": 2432232314}'


def test_the_signature_equals_the_example_of_the_specification() -> None:
    signed = signature(SECRET, ID, 1614265330, BODY)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_another_implementation_of_the_specification_accepts_the_signature() -> None:
    openai = pytest.importorskip("openai")
    webhooks = openai.OpenAI(api_key="unused").webhooks
    now = int(time.time())
    headers = {"webhook-id": ID, "webhook-timestamp": str(now), "webhook-signature": signature(SECRET, ID, now, BODY)}
    webhooks.verify_signature(BODY, headers, secret=SECRET)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        webhooks.verify_signature(BODY + b" ", headers, secret=SECRET)


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1",
    # Metadata services of clouds, and addresses of their hosts for guests.
    "192.0.0.192", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254", "::ffff:192.0.0.192",
    "64:ff9b::c000:c0", "64:ff9b::a9fe:a9fe",
    # Bounds of the registered special address ranges.
    "0.1.2.3", "10.255.255.255", "100.127.255.255", "127.255.255.254", "172.31.255.255", "192.0.0.0", "192.0.0.9",
    "192.0.0.10", "192.0.0.255", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.19.255.255", "198.51.100.1",
    "203.0.113.1", "239.255.255.255", "250.0.0.1", "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1",
    "64:ff9b:1::5db8:d822", "100::1", "2001::1", "2001:0:53aa:64c:0:0:f5ff:fffe", "2001:2::1", "2001:10::1",
    "2001:20::1", "2001:db8::1", "2002:5db8:d822::", "3fff::1", "4000::1", "5f00::1", "febf::1", "feff::1",
    "ff0e::1", "2606:2800:220:1:0:5efe:10.0.0.1", "2606:2800:220:1:200:5efe:169.254.169.254", "fe80::1%eth0",
]  # fmt: skip
PUBLIC = [
    "93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822",
    "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.1", "172.32.0.1", "191.255.255.255", "192.0.1.1",
    "198.17.255.255", "198.20.0.1", "223.255.255.254", "2001:4860:4860::8888", "2a00:1450::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_no_webhook_goes_to_a_private_address(address: str) -> None:
    assert not is_allowed(ip_address(address), [], encrypted=True)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_webhook_to_a_public_address_must_use_https(address: str) -> None:
    assert is_allowed(ip_address(address), [], encrypted=True)
    assert not is_allowed(ip_address(address), [], encrypted=False)


def test_only_networks_allowed_by_the_operator_are_private_targets() -> None:
    networks = [ip_network("10.0.0.0/8"), ip_network("::1/128")]
    for address in ("10.1.2.3", "::1", "::ffff:10.1.2.3"):
        assert is_allowed(ip_address(address), networks, encrypted=False)
    assert not is_allowed(ip_address("127.0.0.1"), networks, encrypted=True)
