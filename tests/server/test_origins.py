"""Which hosts and origins are accepted."""

import pytest

from linpix.server.origins import Origins

NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "xlocalhost",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost/",
    "",
    "[::1",
    "::1",
    "127.0.0.1:8000:1",
    "linpix",
    "127.0.0.1, evil.example",
]


def accepted(origins: Origins, *hosts: str) -> list[str]:
    return [host for host in hosts if origins.refusal("GET", "/", {"host": host}) is None]


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0", "::", "localhost", "10.0.0.5"])
def test_localhost_and_loopback_addresses_are_always_answered_and_other_names_never(listening):
    ours = [
        "localhost",
        "localhost:8000",
        "LOCALHOST.:80",
        "pix.localhost",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]",
        "[::1]:8000",
        "127.9.9.9",
    ]
    assert accepted(Origins(listening), *ours, *NAMES) == ours


def test_the_listening_address_is_accepted_and_a_wildcard_accepts_every_address():
    assert accepted(Origins("10.0.0.5"), "10.0.0.5:8000", "10.0.0.6:8000") == ["10.0.0.5:8000"]
    assert not accepted(Origins("127.0.0.1"), "10.0.0.5")
    assert accepted(Origins("0.0.0.0"), "10.0.0.6") and accepted(
        Origins("::"), "[2001:db8::1]:8000"
    )
    assert accepted(Origins("pix.lan"), "pix.lan:8000") and not accepted(
        Origins("pix.lan"), "fix.lan"
    )


def test_allowed_hosts_are_exactly_those():
    origins = Origins("127.0.0.1", "Pix.example, *.pix.test,10.0.0.9, [2001:DB8:0::1],fd00::0:1")
    ours = [
        "pix.example",
        "PIX.EXAMPLE:443",
        "a.pix.test",
        "a.b.pix.test",
        "10.0.0.9",
        "[2001:db8::1]:80",
        "[fd00::1]",
    ]
    assert (
        accepted(origins, *ours, *NAMES, "a.pix.example", "pix.test", "xpix.test", "10.0.0.8")
        == ours
    )
    assert accepted(Origins("127.0.0.1", "*"), "evil.example")


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("https://pix.example", "pix.example", True),
        ("https://pix.example", "pix.example:443", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("HTTP://LOCALHOST:8000", "localhost:8000", True),
        ("http://127.0.0.1:8001", "127.0.0.1:8000", False),
        ("http://127.0.0.1", "127.0.0.1:8000", False),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("null", "127.0.0.1:8000", False),
        ("", "", False),
        ("http://a.pix.example", "pix.example", False),
        ("http://pix.example.evil", "pix.example", False),
        ("file://", "127.0.0.1:8000", False),
        ("http://127.0.0.1:99999", "127.0.0.1:99999", False),
    ],
)
def test_an_origin_is_ours_when_it_is_the_host_that_was_asked(origin, host, own):
    refusal = Origins("", "*").refusal("POST", "/v1/images/edits", {"origin": origin, "host": host})
    assert (refusal is None) == own
