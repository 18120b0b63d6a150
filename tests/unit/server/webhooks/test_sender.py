from __future__ import annotations

import time

import pytest

from cotrain_server.webhooks.sender import signature

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
