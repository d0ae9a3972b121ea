"""Listening sockets, opened before the weights are read; whether they answer; and a short log when
connections cannot be accepted."""

import asyncio
import errno
import http.client
import logging
import os
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# connections accepted in one go; if accepting fails, asyncio tries this often and logs each failure
AT_ONCE = 128
WAITING = 2048  # connections that the system queues until they are accepted
QUIET_S = 60.0  # between two log lines about connections that could not be accepted

logger = logging.getLogger("linpix")


def listen(host: str, port: int, of: str = "", *, shared: bool = False) -> list[socket.socket]:
    """Open a listening socket for each address of a host; :: or an empty host means every
    interface. Raises OSError.

    of: prefix of the flags that messages name: "metrics-" or "" · shared: with other processes that
    open the same port; the system divides the connections among them.
    """
    asked = f"--{of}host {host} and --{of}port {port}"
    named = host if host.strip("0:") or ":" not in host else ""  # :: would mean IPv6 alone
    try:
        found = socket.getaddrinfo(
            named or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise OSError(
            f"--{of}host {host}: {error.strerror}; give an address or a name of this machine"
        ) from error
    sockets: list[socket.socket] = []
    missing = OSError()
    for family, _, _, _, address in dict.fromkeys(found):
        if sockets:  # the system may have chosen the port of the first one
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            made = socket.create_server(address, family=family, backlog=WAITING, reuse_port=shared)
            # TCP is named: else asyncio leaves Nagle's algorithm on, and an answer's second piece
            # waits 40 ms
            sockets.append(
                socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
            )
        except OSError as error:
            why = f"{asked}: {os.strerror(error.errno or 0).lower()}"
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise OSError(
                    f"{why}; choose another --{of}port, or stop the program that listens there"
                ) from error
            # another address of the name may be this machine's
            missing = OSError(f"{why}; give an address or a name of this machine")
    if not sockets:
        raise missing
    return sockets


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_ready() -> bool:
    """Whether a server of this user and container answers /readyz with 200; found by its sockets,
    whatever its flags.

    For the HEALTHCHECK of a container, on Linux.
    """
    owned = set[str]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # a process that has ended, or another user's
            owned.add(os.readlink(link))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        lines = list[str]()
        with suppress(FileNotFoundError):
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in owned:  # it listens
                address, port = local.split(":")
                words = bytes.fromhex(address)  # of four bytes, each from its last to its first
                parts = [words[at : at + 4][::-1] for at in range(0, len(words), 4)]
                host = socket.inet_ntop(family, b"".join(parts))
                if _answers(host, int(port, 16)):
                    return True
    return False


def _answers(host: str, port: int) -> bool:
    """Whether /readyz is 200 there, by HTTP or HTTPS. The certificate is for other names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for connection in (
        http.client.HTTPConnection(host, port, timeout=1),
        http.client.HTTPSConnection(host, port, timeout=1, context=context),
    ):
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/readyz", headers={"Host": "localhost"})
            if connection.getresponse().status == 200:
                return True
    return False


def log_refused_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most once a minute that connections cannot be accepted; asyncio logs each failure,
    with a traceback.

    Everything else goes to the loop's handler: Serve has one, which knows what to ignore of gRPC.
    """
    logged_at, others = -QUIET_S, loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        if context.get("message") != "socket.accept() out of system resource":
            others(loop, context) if others else loop.default_exception_handler(context)
        elif (now := time.monotonic()) >= logged_at + QUIET_S:
            logged_at = now
            logger.error(
                "new connections have to wait because the system cannot accept more (%s); allow"
                " this process more open files, or limit the connections in a proxy",
                context.get("exception"),
            )

    loop.set_exception_handler(handle)
