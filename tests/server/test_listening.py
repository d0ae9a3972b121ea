"""Listening sockets: opened first, printed as clients write them, and robust when no more files can
be opened.
"""

import os
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from linpix.__main__ import main
from linpix.server.listening import is_ready, listen
from tests.linpix.test_main import linpix
from tests.server.web.routes.test_images import generate
from tools.harness.commands import python
from tools.harness.servers import HANG_S, eventually, serving

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_host_name_is_listened_on_at_all_its_addresses_which_no_other_process_can_take():
    sockets = listen("localhost", 0)
    try:
        for listening in sockets:
            host, port = listening.getsockname()[:2]
            with socket.create_connection((host, port), timeout=HANG_S):
                pass
            with pytest.raises(
                OSError,
                match=f"--metrics-port {port}: address already in use; choose another --metri",
            ):
                listen(host, port, "metrics-")
    finally:
        for listening in sockets:
            listening.close()


def test_every_interface_means_both_families_on_one_port():
    """Also where the system chooses the port."""
    for host in ("::", "0:0::0", ""):
        sockets = listen(host, 0)
        addresses = {listening.family: listening.getsockname()[:2] for listening in sockets}
        for listening in sockets:
            listening.close()
        assert addresses[socket.AF_INET][0] == "0.0.0.0"
        assert len({port for _, port in addresses.values()}) == 1
        if socket.has_dualstack_ipv6():
            assert addresses[socket.AF_INET6][0] == "::"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_this_machines_is_refused_with_a_cure(host):
    with pytest.raises(
        OSError, match=f"--host {host}.*; give an address or a name of this machine"
    ):
        listen(host, 0)


TAKEN_WHEN_IT_READS = """
import socket, sys
from linpix.server import app
from linpix.__main__ import main

def reading(settings):
    for port in (settings.port, settings.metrics_port):
        socket.create_connection(("127.0.0.1", port)).close()
    raise ValueError("both are taken")

app.create_app = reading
sys.exit(main())
"""


def test_both_ports_are_taken_before_the_weights_are_read():
    ports = free_port(), free_port()
    ended = python(TAKEN_WHEN_IT_READS, "serve", "--port", ports[0], "--metrics-port", ports[1])
    assert (ended.returncode, ended.stderr) == (2, "linpix serve: both are taken\n")


def test_one_port_for_both_is_refused_before_the_weights_are_read():
    port = free_port()
    ended = linpix(f"serve --port {port} --metrics-port {port} --checkpoints missing")
    assert ended.returncode == 2
    assert (
        f"--metrics-port {port}: address already in use; choose another --metrics-port"
        in ended.stderr
    )


def test_without_free_file_descriptors_it_says_so_once_and_answers_open_connections(tiny):
    few = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    with serving(tiny.parent, before=few) as server, server.client() as client:
        assert client.get("/healthz").status_code == 200
        idle = [server.connect() for _ in range(100)]
        try:
            assert eventually(
                lambda: any("the system cannot accept more" in line for line in server.printed)
            )
            assert generate(client).status_code == 200
            with pytest.raises(httpx.TransportError):
                httpx.get(server.url + "/healthz", timeout=1.5)
        finally:
            for connection in idle:
                connection.close()
        assert eventually(lambda: client.get("/healthz").status_code == 200)
        assert eventually(lambda: server.get("/healthz").status_code == 200)
        told = [line for line in server.printed if "linpix.access" not in line]
    assert len(told) == 3, told  # what it is, that it serves, and that


@pytest.mark.parametrize("broken", ["full", "closed"])
def test_a_blocked_standard_error_does_not_stop_the_service(tiny, broken):
    port = free_port()
    if broken == "full":
        to = os.open("/dev/full", os.O_WRONLY)
    else:
        end, to = os.pipe()
        os.close(end)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "linpix",
            "serve",
            "--port",
            str(port),
            "--checkpoints",
            str(tiny.parent),
        ],
        stderr=to,
    )
    os.close(to)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:

            def answers() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            assert eventually(answers)
            assert generate(client).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait(HANG_S)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The flags of a certificate for localhost, which signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made.split(), *name], cwd=folder, check=True, capture_output=True)
    return f"--tls-cert={folder}/cert.pem --tls-key={folder}/key.pem"


def test_https_needs_no_proxy_and_leaves_the_port_of_the_metrics_as_it_is(tiny, certificate):
    flags = f"{certificate} --metrics-port 0"
    trusted = ssl.create_default_context(cafile=certificate.split()[0].partition("=")[2])
    with serving(tiny.parent, flags) as server, server.client(verify=trusted) as client:
        assert server.url.startswith("https://")
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post("/v1/images/generations", json={}).status_code == 200
        [probes] = (line for line in server.printed if "metrics and health" in line)
        assert httpx.get(probes.split()[-1] + "/readyz").status_code == 200
        assert is_ready()
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"))


def test_a_certificate_without_its_own_key_is_refused_before_the_weights_are_read(
    certificate, capsys
):
    [flag, _] = certificate.split()
    other = flag.replace("--tls-cert", "--tls-key")
    assert main(["serve", "--checkpoints=/nowhere", flag, other]) == 2
    assert "give a certificate and its own key" in capsys.readouterr().err
