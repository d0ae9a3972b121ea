"""Which requests are answered: by the host names of this service, and by the origins whose pages
may use it.

A page of any site may send requests to 127.0.0.1, but it cannot forge the headers Host, Origin and
Sec-Fetch-Site. Host has the name that was looked up: the attacker's own, if it was rebound to this
machine. Origin and Sec-Fetch-Site say which site the page belongs to.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from .errors import ServiceError, foreign_host, foreign_origin

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(\d{1,5}))?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
# no name ends with a number
_ALLOWED = re.compile(r"(?!.*\.\d+$)(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def entries(text: str) -> list[str]:
    """The parts of a comma-separated setting, in lower case."""
    return [part.strip().lower() for part in text.split(",") if part.strip()]


@functools.lru_cache(64)  # nearly all requests have one of a few names
def _name(host: str) -> str | None:
    """The name or address in a Host header, in lower case, without port, brackets and final dot;
    None if malformed.
    """
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


class Origins:
    """The host names of this service, and the origins whose pages may use it besides its own."""

    def __init__(self, listening: str, hosts: str = "", allowed: str = "") -> None:
        """listening: an address; it and localhost are always accepted · hosts: more names,
        comma-separated; *.example.com for subdomains, * for any · allowed: comma-separated origins
        such as https://app.example.com. Raises ValueError.
        """
        names = entries(hosts)
        for name in names:
            if name != "*" and _address(name.strip("[]")) is None and not _ALLOWED.fullmatch(name):
                raise ValueError(
                    "hosts must be names or addresses without scheme and port, such as"
                    " pix.example.com, *.example.com or 10.0.0.5"
                )
        self._any = "*" in names
        address = _address(listening)
        self._any_address = not listening or (address is not None and address.is_unspecified)
        exact = (name.strip("[]") for name in names if name[0] != "*")
        self._names = {
            "localhost",
            listening.lower(),
            *(str(_address(name) or name) for name in exact),
        }
        self._below = (".localhost", *(name[1:] for name in names if name[:2] == "*."))
        self.allowed = frozenset(_origin(text) for text in entries(allowed))

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> ServiceError | None:
        """The error for a request to a name that is not this service's, or of a page that may not
        use it.

        Every page may send GET and HEAD outside /v1/, so that links work: they cost nothing, and a
        page of another site learns nothing from them.
        """
        host = headers.get("host")
        if host is not None and not self._any:
            name = _name(host)
            # it is not looked up, so it cannot be rebound
            address = _address(name) if name else None
            near = address is not None and (self._any_address or address.is_loopback)
            if name is None or not (
                near or str(address or name) in self._names or name.endswith(self._below)
            ):
                return foreign_host(host)
        if method in ("GET", "HEAD") and not path.startswith("/v1/"):
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none").lower()
        # curl and SDKs; also images, links and scripts of a page, which only `site` shows
        if origin is None:
            if site in ("none", "same-origin"):
                return None
        elif origin.lower() in self.allowed or self._own(origin, host or ""):
            return None
        page = f"a page of another origin ({site})" if origin is None else f"origin {origin}"
        ours = "this server" if host is None else host
        return foreign_origin(page, ours)

    @staticmethod
    def _own(origin: str, host: str) -> bool:
        """Whether an origin is this service at the requested host, with any scheme: a proxy may
        have ended TLS.
        """
        try:
            page = urlsplit(origin)
            asked = urlsplit(f"{page.scheme}://{host}")
            default = _DEFAULT_PORTS.get(page.scheme)
            return bool(page.hostname) and (
                (page.hostname, page.port or default) == (asked.hostname, asked.port or default)
            )
        except ValueError:
            return False


def _origin(text: str) -> str:
    """An origin as browsers send it. Raises ValueError if it stands for any site, or if they send
    no such origin.
    """
    if text in ("*", "null"):
        raise ValueError(f"{text} would allow pages of every site; list the origins instead")
    found = _ORIGIN.fullmatch(text)
    if not found or found[1] in ("ws", "wss", "ftp", "file") or int(found[3] or 0) > 65535:
        raise ValueError(
            "origins must be scheme, host and port without a path, such as https://app.example.com;"
            " give each subdomain by itself, and other letters in the xn-- form"
        )
    return text.removesuffix(f":{_DEFAULT_PORTS.get(found[1])}")


def check_proxies(text: str) -> None:
    """Raise ValueError if no proxy can have one of these comma-separated addresses or networks; *
    stands for any.
    """
    if text == "*":
        return
    for entry in entries(text):
        try:
            network = ipaddress.ip_network(entry)
        except ValueError:
            network = None
        if (
            network is None
            or (network.version == 6 and network.network_address.ipv4_mapped is not None)
            or (network.num_addresses == 1 and network.network_address.is_unspecified)
        ):
            raise ValueError(
                "must be addresses or networks of proxies, such as 10.0.0.5 or 172.16.0.0/12 (a"
                " network begins with its first address), or * alone; names are not looked up"
            )
