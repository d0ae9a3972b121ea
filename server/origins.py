"""Which requests are answered: by the host names of this service, and by the origins whose pages may use it.

A page of any site may send requests to 127.0.0.1, but it cannot forge the headers Host, Origin and Sec-Fetch-Site.
Host has the name that was looked up: the attacker's own, if it was rebound to this machine. Origin and Sec-Fetch-Site
say which site the page belongs to.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(\d{1,5}))?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
_ALLOWED = re.compile(r"(?!.*\.\d+$)(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")  # no name ends with a number
_DEFAULT_PORTS = {"http": 80, "https": 443}


def entries(text: str) -> list[str]:
    """The parts of a comma-separated setting, in lower case."""
    return [part.strip().lower() for part in text.split(",") if part.strip()]


@functools.lru_cache(64)  # nearly all requests have one of a few names
def _name(host: str) -> str | None:
    """The name or address in a Host header, in lower case, without port, brackets and final dot; None if malformed."""
    found = _HOST.fullmatch(host.strip())
    return found[1].strip("[]").lower().removesuffix(".") if found else None


@functools.lru_cache(64)
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(listening: str) -> bool:
    """Whether a listening address can be reached only from this machine."""
    address = _address(listening)
    return listening == "localhost" or (address is not None and address.is_loopback)


class Hosts:
    """Host names that are accepted: localhost, the address that the service listens on, and those that are allowed."""

    def __init__(self, listening: str, allowed: str = "") -> None:
        """allowed: comma-separated names; *.example.com for subdomains, * for any. Raises ValueError."""
        names = entries(allowed)
        for name in names:
            if name != "*" and _address(name.strip("[]")) is None and not _ALLOWED.fullmatch(name):
                raise ValueError("hosts must be names or addresses without scheme and port, such as pix.example.com, "
                                 "*.example.com or 10.0.0.5")
        self._any = "*" in names
        address = _address(listening)
        self._any_address = not listening or (address is not None and address.is_unspecified)
        exact = (name.strip("[]") for name in names if name[0] != "*")
        self._names = {"localhost", listening.lower(), *(str(_address(name) or name) for name in exact)}
        self._below = (".localhost", *(name[1:] for name in names if name[:2] == "*."))

    def accept(self, host: str) -> bool:
        name = _name(host)
        if self._any or name is None:
            return self._any
        address = _address(name)
        if address is not None and (self._any_address or address.is_loopback):
            return True  # an address is not looked up, so it cannot be rebound
        return str(address or name) in self._names or name.endswith(self._below)


class Origins:
    """The origins whose pages may use this service, besides its own."""

    def __init__(self, allowed: str = "") -> None:
        """allowed: comma-separated origins such as https://app.example.com. Raises ValueError."""
        self.allowed = frozenset(_origin(text) for text in entries(allowed))

    def foreign(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        """The page that must not send this request, in words; None if it may, or if no page sent it.

        GET and HEAD outside /v1/ are always allowed, so that links work: they cost nothing, and a page of another site
        learns nothing from them.
        """
        if method in ("GET", "HEAD") and not path.startswith("/v1/"):
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none").lower()
        if origin is None:  # curl and SDKs; also images, links and scripts of a page, which only `site` shows
            return f"a page of another origin ({site})" if site not in ("none", "same-origin") else None
        if origin.lower() in self.allowed or self._own(origin, headers.get("host", "")):
            return None
        return f"origin {origin}"

    @staticmethod
    def _own(origin: str, host: str) -> bool:
        """Whether an origin is this service at the requested host, with any scheme: a proxy may have ended TLS."""
        try:
            page = urlsplit(origin)
            asked = urlsplit(f"{page.scheme}://{host}")
            default = _DEFAULT_PORTS.get(page.scheme)
            return bool(page.hostname) and ((page.hostname, page.port or default)
                                            == (asked.hostname, asked.port or default))
        except ValueError:
            return False


def _origin(text: str) -> str:
    """An origin as browsers send it. Raises ValueError if it stands for any site, or if they send no such origin."""
    if text in ("*", "null"):
        raise ValueError(f"{text} would allow pages of every site; list the origins instead")
    found = _ORIGIN.fullmatch(text)
    if not found or found[1] in ("ws", "wss", "ftp", "file") or int(found[3] or 0) > 65535:
        raise ValueError("origins must be scheme, host and port without a path, such as https://app.example.com; give "
                         "each subdomain by itself, and other letters in the xn-- form")
    return text.removesuffix(f":{_DEFAULT_PORTS.get(found[1])}")


def check_proxies(text: str) -> None:
    """Raise ValueError if no proxy can have one of these comma-separated addresses or networks; * stands for any."""
    for entry in entries(text) if text != "*" else []:
        try:
            network = ipaddress.ip_network(entry)
        except ValueError:
            network = None
        if network is None or (network.version == 6 and network.network_address.ipv4_mapped is not None) or (
                network.num_addresses == 1 and network.network_address.is_unspecified):
            raise ValueError("must be addresses or networks of proxies, such as 10.0.0.5 or 172.16.0.0/12 (a network "
                             "begins with its first address), or * alone; names are not looked up")
