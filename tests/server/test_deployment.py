"""The image and the stack beside it, as far as they can be checked without a container engine."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from linpix.server.origins import Origins
from linpix.server.settings import Settings
from tests.fuzz.pictures import noise
from tests.server.web.routes.test_images import encode, generate
from tools.harness.commands import ROOT, ran
from tools.harness.servers import serving


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, the rest) in order, continuation lines joined."""
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1])
        for line in whole.splitlines()
        if line.strip()
    ]


INSTRUCTIONS = dockerfile()
LAST_STAGE = INSTRUCTIONS[
    max(index for index, (word, _) in enumerate(INSTRUCTIONS) if word == "FROM") :
]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that matches it or a folder above
    it decides.
    """
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = Path(path).parts
            above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            names = list(parts) if line.startswith("**/") else above
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                allowed = line.startswith("!")
    return allowed


def variables(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(words))


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


# --- Dockerfile ---


def test_the_image_holds_what_its_packages_need_and_nothing_private():
    for path in (
        "linpix/__main__.py",
        "pyproject.toml",
        "server/static/index.html",
        "model/ops.py",
        "training/loop.py",
        "checkpoints/mnist-small/config.json",
        "csrc/recurrent.cpp",
    ):
        assert in_context(path), path
    for path in (
        ".git/config",
        ".env",
        ".venv/bin/python",
        "tests/conftest.py",
        "runs/a",
        "model/__pycache__/ops.pyc",
        "checkpoints/mnist.training/state.pt",
        "csrc/build/linpix.so",
    ):
        assert not in_context(path), path


def test_torch_is_pinned_first_and_no_later_install_can_pull_another():
    commands = [rest for word, rest in INSTRUCTIONS if word == "RUN"]
    installs = [
        found for command in commands for found in re.findall(r"pip install[^&;]*", command)
    ]
    uv, *first, second, third = installs  # uv is not in the environment
    assert uv == "pip install --target /opt/uv uv "
    assert len(first) == 2 and all('"$TORCH_SPEC"' in install for install in first)
    assert "--constraint /opt/constraints.txt" in second
    assert {"--no-deps", "--no-build-isolation"} <= set(third.split())
    [pinned] = [
        rest.split("=", 1)[1]
        for word, rest in INSTRUCTIONS
        if word == "ARG" and rest.startswith("TORCH_SPEC")
    ]
    assert (
        pinned
        == re.search(r"^TORCH_SPEC \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    )
    for name in ("TORCH_INDEX_URL", "INDEX_URL"):
        assert ("ARG", f"{name}=") in INSTRUCTIONS, "empty means pip's default"


@pytest.mark.parametrize(
    ("given", "index"),
    [
        ({"DEVICE": "cpu"}, "--torch-backend cpu"),
        ({"DEVICE": "cuda"}, None),
        ({"DEVICE": "cpu", "TORCH_INDEX_URL": "t"}, "t"),
        ({"DEVICE": "cpu", "INDEX_URL": "i"}, "i"),
        ({"DEVICE": "cuda", "TORCH_INDEX_URL": "t", "INDEX_URL": "i"}, "t"),
    ],
)
def test_an_image_for_a_cpu_gets_a_torch_without_cuda_unless_an_index_is_named(
    tmp_path, given, index
):
    """The shell of the Dockerfile, with installers that say what they were asked for: there is no
    network here.
    """
    [command] = [rest for word, rest in INSTRUCTIONS if word == "RUN" and '"$TORCH_SPEC"' in rest]
    command = command.split("&& python -c")[0].replace("/opt/uv/bin/uv", "uv")
    for name in ("pip", "uv"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    told = ran(
        f"sh -ec {shlex.quote(command)}",
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "TORCH_SPEC": "torch==1", **given},
    )
    *_, asked = told.stdout.splitlines()
    expected = (
        f"uv pip install {index} torch==1"
        if index == "--torch-backend cpu"
        else f"pip install {f'--index-url {index} ' if index else ''}torch==1"
    )
    assert asked == expected


def test_the_base_is_one_exact_version_and_the_last_stage_has_no_compiler_and_installs_nothing():
    images = [
        rest.split("=", 1)[1] for word, rest in INSTRUCTIONS if word == "ARG" and "_IMAGE=" in rest
    ]
    assert len(images) == 2
    for image in images:
        assert re.search(r":\d+\.\d+\.\d+-[\w.-]+(@sha256:[0-9a-f]{64})?$", image), image
    assert LAST_STAGE[0] == ("FROM", "${PYTHON_IMAGE}")
    assert re.search(r"PYTHON_IMAGE=python:[\d.]+-slim-", f"PYTHON_IMAGE={images[0]}"), (
        "the slim ones have no compiler"
    )
    commands = " ".join(rest for word, rest in LAST_STAGE if word == "RUN")
    assert not re.search(r"apt|pip|gcc|g\+\+|build-essential|curl|wget", commands)
    copied = [rest for word, rest in LAST_STAGE if word in ("COPY", "ADD")]
    assert copied == ["--from=build /opt/venv /opt/venv", "--from=build /opt/linpix /opt/linpix"]
    compiling = [
        index for index, (word, rest) in enumerate(INSTRUCTIONS) if word == "RUN" and "g++" in rest
    ]
    assert compiling and max(compiling) < len(INSTRUCTIONS) - len(LAST_STAGE)


def test_the_server_runs_as_nobody_special_and_gets_its_signals_itself():
    last = dict(LAST_STAGE)
    assert last["USER"].split(":")[0].isdecimal()
    assert int(last["USER"].split(":")[0]) > 0
    assert json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]) == ["linpix", "serve"]
    assert last["STOPSIGNAL"] == "SIGTERM"
    environment = variables(last["ENV"])
    assert environment["LINPIX_HOST"] == "0.0.0.0"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert {
        name.removeprefix("LINPIX_").lower() for name in environment if name.startswith("LINPIX_")
    } <= set(Settings.model_fields)


HEALTHY = """
"$0" -c "$1" && exit 1                         # nobody there
"$0" -m linpix serve --port 0 --checkpoints "$2" $3 2>/dev/null &
for _ in $(seq 300); do "$0" -c "$1" && break; sleep 0.1; done
"$0" -c "$1" || exit 2
kill $! && wait $! || exit 3
! "$0" -c "$1" || exit 4
"""


def apart(namespaces: str) -> list[str]:
    """The beginning of a command that runs in namespaces of its own, as in a container."""
    user = "" if os.geteuid() == 0 else "--user --map-root-user"
    command = f"unshare {namespaces} {user}"
    if shutil.which("unshare") is None or ran(command, "true").returncode:
        pytest.skip(f"this machine gives no namespaces, as root or in one of a user: {command}")
    return command.split()


@pytest.mark.parametrize(
    "flags",
    [
        "--host 0.0.0.0 --metrics-port 0",
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in ("", "--host ::", "--host localhost")
        ),
    ],
)
def test_the_health_check_tells_a_ready_server_from_none_whatever_its_flags(tiny, flags):
    """In a namespace of processes of its own, as a container is: other servers of this machine are
    not asked.
    """
    python, *rest = json.loads(dict(LAST_STAGE)["HEALTHCHECK"].split("CMD ", 1)[1])
    assert (python, rest[0]) == ("python", "-c")
    ended = subprocess.run(
        [
            *apart("--pid --fork --mount-proc"),
            *["sh", "-c", HEALTHY, sys.executable, rest[1], str(tiny.parent), flags],
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_the_server_needs_nothing_to_write_to_but_its_scratch_folder(tiny, tmp_path):
    """A real server in a mount namespace of its own, whose root is read-only, with a tmpfs as the
    image has /tmp.
    """
    locked_up = (
        'mount -o remount,bind,ro / && mount -t tmpfs tmpfs "$0" && exec env HOME=/nowhere'
        ' TMPDIR="$0" "$@"'
    )
    before = [*apart("--mount"), "sh", "-euc", locked_up, str(tmp_path)]
    # over the megabyte that stays in memory
    big = noise(1200, 1200, 3)
    with serving(tiny.parent, before=before) as server, server.client() as client:
        mounts = {
            line.split()[1]: line.split()[3]
            for line in Path(f"/proc/{server.process.pid}/mounts").read_text().splitlines()
        }
        assert mounts["/"].split(",")[0] == "ro"
        assert "tmpfs" in Path(f"/proc/{server.process.pid}/mounts").read_text()
        assert generate(client, n=2).status_code == 200
        upload = {"image": ("big.png", encode(big))}
        assert (
            client.post("/v1/images/edits", files=upload, data={"keep_rows": 4}).status_code == 200
        )
        for path in ("/", "/docs", "/openapi.json", "/metrics", "/readyz"):
            assert client.get(path).status_code == 200


# --- deploy/linpix.service ---

UNIT = (ROOT / "deploy/linpix.service").read_text()


@pytest.mark.parametrize("keys", [False, True], ids=["as it is", "with keys"])
def test_systemd_takes_the_unit_and_finds_it_locked_up(tmp_path, keys):
    if shutil.which("systemd-analyze") is None:
        pytest.skip(
            "systemd-analyze is not installed; on Debian and Ubuntu: apt-get install systemd"
        )
    unit, command = UNIT, "/opt/linpix/.venv/bin/linpix serve\n"
    assert unit.count(f"ExecStart={command}") == 1
    # systemd looks for the program
    unit = unit.replace(command, f"{sys.executable} -m linpix serve\n")
    if keys:
        unit = re.sub(r"(?m)^#(?=[A-Z]\w+=)", "", unit)
        assert (
            "\nLoadCredential=keys:" in unit and "\nEnvironment=LINPIX_API_KEYS=%d/keys\n" in unit
        )
    (tmp_path / "linpix.service").write_text(unit)
    verified = ran(f"systemd-analyze verify {tmp_path}/linpix.service")
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    # of 100
    exposed = ran(
        f"systemd-analyze security --offline=true --threshold=20 {tmp_path}/linpix.service"
    )
    assert exposed.returncode == 0, exposed.stdout


def test_systemd_gives_the_server_time_to_drain_and_the_temporary_files_that_uploads_need():
    lines = dict(line.split("=", 1) for line in UNIT.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert seconds(lines["TimeoutStopSec"]) > Settings().drain_timeout + 10
    assert lines["PrivateTmp"] == "yes" and lines["ExecReload"] == "kill -HUP $MAINPID"
    assert lines["Restart"] == "on-failure", "status 70 is a failure, 0 after SIGTERM is none"


def test_systemd_tries_a_start_that_fails_for_a_while_and_not_for_ever():
    lines = dict(line.split("=", 1) for line in UNIT.splitlines() if re.match(r"[A-Z]\w+=", line))
    # a start may take 2 s
    tries_s = int(lines["StartLimitBurst"]) * (seconds(lines["RestartSec"]) + 2.0)
    assert 60 <= tries_s < seconds(lines["StartLimitIntervalSec"])


# --- docker-compose.yml and deploy/ ---


def test_every_port_is_published_on_this_machine_only():
    ports = {name: service["ports"] for name, service in SERVICES.items()}
    assert set(ports) == {"linpix", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)


def test_the_stack_runs_the_server_on_a_root_file_system_that_it_cannot_write_to():
    server = SERVICES["linpix"]
    assert server["read_only"] is True
    [scratch] = server["tmpfs"]
    assert scratch.split(":")[0] == "/tmp"
    assert {"noexec", "nosuid", "nodev"} <= set(scratch.split(":")[1].split(","))
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert "user" not in server or server["user"] != "root"


def test_every_mounted_file_is_there_and_every_volume_is_declared():
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (
                (ROOT / source).exists()
                if source.startswith("./")
                else source in COMPOSE["volumes"]
            ), mount


def test_the_stack_gives_the_server_time_to_drain():
    drain = float(SERVICES["linpix"]["environment"]["LINPIX_DRAIN_TIMEOUT"])
    closing = 10  # uvicorn's own time for connections, after the drain
    assert seconds(SERVICES["linpix"]["stop_grace_period"]) > drain + closing


def test_prometheus_asks_the_port_that_the_server_listens_on():
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["job_name"] == "linpix"
    assert job["static_configs"] == [
        {"targets": [f"linpix:{variables(dict(LAST_STAGE)['ENV'])['LINPIX_PORT']}"]}
    ]
    allowed = SERVICES["linpix"]["environment"]["LINPIX_ALLOWED_HOSTS"]
    assert not Origins("0.0.0.0", allowed).refusal(
        "GET", "/metrics", {"host": job["static_configs"][0]["targets"][0]}
    )


def test_grafana_finds_the_data_source_and_the_dashboards():
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    [provider] = yaml.safe_load((provisioning / "dashboards/linpix.yml").read_text())["providers"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["global"][
        "scrape_interval"
    ]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/linpix.json").read_text())
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == scrape, "$__rate_interval follows it"
    assert dashboard["templating"]["list"][0]["current"]["value"] == source["uid"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/linpix.json"
