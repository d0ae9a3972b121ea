"""The metrics, and each query of the dashboard and the alerts, by a real Prometheus under load."""

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.web.routes.test_images import generate, occluded
from tools.harness.commands import ROOT, words_of
from tools.harness.servers import EAGER, HANG_S, Process, eventually, fetch, serving

pytestmark = pytest.mark.slow

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/linpix.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}
VARIABLES = {
    one["name"]: one["query"]["query"]
    for one in DASHBOARD["templating"]["list"]
    if one["type"] == "query"
}
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
ASKED = QUERIES | {name: rule["expr"] for name, rule in ALERTS.items()}
# a metric, and the labels that it is to have
SELECTOR = re.compile(r"\b((?:linpix|process)_\w+|up)\b(?:{([^}]*)})?")
WINDOW = "1m"  # what Grafana would put for $__rate_interval; long enough to hold all of the load

# every metric of the service: its type, name and labels
TABLE = """
counter    linpix_images_completed                model backend outcome
counter    linpix_images_drawn_again              model backend
counter    linpix_pixels_generated                model backend
counter    linpix_requests                        outcome endpoint
counter    linpix_requests_rejected               reason
gauge      linpix_requests_running
gauge      linpix_requests_waiting
gauge      linpix_images_waiting                  model priority
gauge      linpix_request_bodies_reading
counter    linpix_deadlines_passed                state
gauge      linpix_state_slots                     model
gauge      linpix_state_slots_used                model
counter    linpix_state_saturations               model
counter    linpix_faults_isolated                 model fault
counter    linpix_quanta_retried                  model
counter    linpix_engine_restarts
gauge      linpix_engine_heartbeat_age_seconds
counter    linpix_checkpoint_reloads              outcome
histogram  linpix_request_duration_seconds        model endpoint
histogram  linpix_queue_wait_seconds              model
histogram  linpix_first_row_seconds               model
histogram  linpix_engine_step_seconds             model backend
histogram  linpix_engine_step_batch_size
histogram  linpix_prefill_seconds                 model
gauge      linpix_comparison_images_per_second    backend
gauge      linpix_kernel_info                     version torch kernel
"""
METRICS = {
    name: (kind, set(labels)) for kind, name, *labels in map(str.split, TABLE.strip().splitlines())
}


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> list[dict]:
        answer = fetch(f"{self.url}/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        return body["data"][
            {"query": "result", "targets": "activeTargets", "rules": "groups"}[path]
        ]


@pytest.fixture(scope="module")
def started(tiny: Path) -> Iterator[Process]:
    """A server of its own, since what it counts is compared."""
    # slow enough to be full
    with serving(tiny.parent, *EAGER, "--slots 2 --max-queue 4") as process:
        yield process


@pytest.fixture(scope="module")
def at_start(started: Process) -> str:
    return started.get("/metrics").text


@pytest.fixture(scope="module")
def prometheus(started: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with watching(started, tmp_path_factory.mktemp("prometheus")) as watcher:
        yield watcher


@contextlib.contextmanager
def watching(server: Process, folder: Path, targets: Path | None = None) -> Iterator[Prometheus]:
    """The project's own configuration, but for the target and a scrape every second; it has scraped
    once.

    targets: folder of --metrics-targets, of a cluster.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed; on Debian and Ubuntu: apt-get install prometheus")
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [urlsplit(server.url).netloc]
    if targets is not None:
        del config["scrape_configs"][0]["static_configs"]
        config["scrape_configs"][0]["file_sd_configs"] = [{"files": [f"{targets}/*.json"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for rules in config["rule_files"]:
        shutil.copy(ROOT / "deploy" / rules, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            words_of(
                [
                    f"{program} --config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data --web.listen-address={address}",
                ]
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    found = Prometheus(f"http://{address}")

    def scraped() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"prometheus ended with {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError, ValueError, AssertionError):
            return [
                sample["value"][1] for sample in found.ask("query", query='up{job="linpix"}')
            ] == ["1"] * (4 if targets else 1)
        return False

    try:
        assert eventually(scraped), log.read_text()
        yield found
    finally:
        process.terminate()
        try:
            process.wait(HANG_S)
        finally:
            process.kill()


def put_load(server: Process) -> None:
    """Of everything that is counted at least one; when it returns, all of it is over."""
    with server.client() as client:
        with ThreadPoolExecutor(4) as crowd:  # each of them fills the service
            crowded = crowd.map(lambda _: generate(client, n=6).status_code, range(4))
        assert 429 in list(crowded)
        assert generate(client, temperature=-1).status_code == 400

        def draw(seed: int) -> int:
            return generate(client, n=2, seed=seed).status_code

        with ThreadPoolExecutor(3) as clients:
            assert set(clients.map(draw, range(9))) == {200}
        assert (
            client.post(
                "/v1/images/edits", files={"image": ("a.png", occluded(), "image/png")}
            ).status_code
            == 200
        )

        def left() -> bool:
            here = urlsplit(server.url)
            with socket.create_connection((here.hostname, here.port)) as leaving:
                leaving.sendall(
                    b"POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-length:"
                    b' 8\r\ncontent-type: application/json\r\n\r\n{"n": 4}'
                )
                time.sleep(0.02)  # it may be admitted first; were it not, the next attempt may
            return (
                server.metric('linpix_requests_total{endpoint="generations",outcome="cancelled"}')
                > 0
            )

        assert eventually(left)
        answer = client.post(
            "/v1/compare", json={"backends": ["linear", "softmax"], "batch": [1], "budget": 1}
        )
        assert answer.status_code == 202, answer.text
        where = f"/v1/compare/{answer.json()['id']}"
        assert eventually(lambda: client.get(where).json()["status"] != "running")
        assert client.get(where).json()["status"] == "completed", client.get(where).json()["error"]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, started: Process, at_start: str) -> Process:
    if shutil.which("prometheus"):
        request.getfixturevalue("prometheus")  # it must see the counters before they move
    put_load(started)
    return started


def families(text: str) -> dict[str, tuple[str, set[frozenset[tuple[str, str]]]]]:
    """Name to type and the label sets of its samples; a bucket's bound is no label."""
    found = {}
    for family in text_string_to_metric_families(text):
        labels = {
            frozenset(pair for pair in sample.labels.items() if pair[0] != "le")
            for sample in family.samples
        }
        found[family.name] = family.type, labels
    return found


def test_the_metrics_have_these_names_types_and_labels(at_start):
    found = {
        name: (kind, {name for labels in samples for name, _ in labels})
        for name, (kind, samples) in families(at_start).items()
        if not name.startswith(("process_", "python_"))
    }
    assert found == METRICS
    assert "process_resident_memory_bytes" in at_start


def test_every_child_is_there_from_the_start(at_start, loaded):
    assert families(loaded.get("/metrics").text) == families(at_start)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_panel_has_something_to_show(query, prometheus, loaded):
    for variable in VARIABLES:
        query = query.replace(f"${variable}", ".*")
    query = query.replace("$__rate_interval", WINDOW)

    def shown() -> bool:
        return any(
            math.isfinite(float(sample["value"][1]))
            for sample in prometheus.ask("query", query=query)
        )

    assert eventually(shown), f"{query} gives {prometheus.ask('query', query=query)}"


@pytest.mark.parametrize("name", ASKED)
def test_every_metric_that_is_asked_for_has_the_labels_that_are_asked_for(name, prometheus, loaded):
    found = SELECTOR.findall(ASKED[name])
    assert found or "ALERTS" in ASKED[name], "this query asks for nothing of LinPix's"
    # replica: of several engines only, nowhere else
    carried = {"job", "instance", "le", "alertname", "replica"}
    for metric, matchers in found:
        for label, operator, values in re.findall(r'(\w+)(=~?)"([^"$]*)"', matchers):
            for value in values.split("|"):
                one = f'{metric}{{{label}="{value}"}}'
                assert prometheus.ask("query", query=one), f"there is no {one}"
            assert operator == "=~" or "|" not in values
        series = prometheus.ask("query", query=metric)
        assert series, f"there is no {metric}"
        carried |= set(series[0]["metric"])
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", ASKED[name]):
        assert {label.strip() for label in labels.split(",")} <= carried


def test_legends_name_labels_that_their_query_keeps():
    for panel in PANELS:
        for target in panel["targets"]:
            kept = re.findall(r"\bby\s*\(([^)]*)\)", target["expr"])
            metrics = [metric for metric, _ in SELECTOR.findall(target["expr"])]
            families = [re.sub("_(total|sum|count|bucket)$", "", metric) for metric in metrics]
            known = (
                {label.strip() for labels in kept for label in labels.split(",")}
                if kept
                else {"instance"}.union(
                    *(METRICS[family][1] for family in families if family in METRICS)
                )
            )
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, panel["title"]


def test_a_panel_shows_the_servers_and_models_that_are_chosen_and_names_them():
    for panel in PANELS:
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            named = panel["type"] in ("timeseries", "bargauge")
            assert not named or "instance" in labels, panel["title"]
            for metric, matchers in SELECTOR.findall(target["expr"]):
                family = re.sub("_(total|sum|count|bucket)$", "", metric)
                assert 'instance=~"$instance"' in matchers, panel["title"]
                if "model" in METRICS.get(family, ("", ()))[1]:
                    assert 'model=~"$model"' in matchers, panel["title"]
                    assert not named or "model" in labels, panel["title"]


@pytest.mark.parametrize("name", VARIABLES)
def test_servers_and_models_can_be_chosen(name, prometheus, started, tiny):
    metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", VARIABLES[name]).groups()
    found = prometheus.ask("query", query=metric.replace("$instance", ".*"))
    there = {"instance": urlsplit(started.url).netloc, "model": tiny.name}
    assert label == name and {one["metric"][label] for one in found} == {there[name]}


def test_prometheus_evaluates_every_alert_and_none_fires_for_a_service_that_was_busy(
    prometheus, loaded
):
    def evaluated() -> bool:
        [group] = prometheus.ask("rules")
        return {(rule["name"], rule["health"]) for rule in group["rules"]} == {
            (name, "ok") for name in ALERTS
        }

    assert eventually(evaluated), prometheus.ask("rules")
    [group] = prometheus.ask("rules")
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_an_engine_that_dies_fires_an_alert(tiny, tmp_path):
    with (
        serving(tiny.parent, "--faults die:at=3") as server,
        watching(server, tmp_path) as watcher,
    ):
        assert watcher.ask("query", query='ALERTS{alertstate="firing"}') == []
        assert generate(server.client()).status_code == 500
        firing = (
            'ALERTS{alertstate="firing", alertname="LinpixRestarts", job="linpix", severity="page"}'
        )
        assert eventually(lambda: bool(watcher.ask("query", query=firing))), watcher.ask("rules")
