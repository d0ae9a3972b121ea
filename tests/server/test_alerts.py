"""The alerts of deploy/: Prometheus's checks and rule tests, and a line in docs/operate.md for
each.
"""

import re
import shutil
import subprocess

import pytest
import yaml

from tools.harness.commands import ROOT, ran

[GROUP] = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
RULES = GROUP["rules"]
NAMES = [rule["alert"] for rule in RULES]
TESTS = yaml.safe_load((ROOT / "tests/server/alerts_test.yml").read_text())
RUNBOOK = dict(
    re.findall(
        r"^\| `(Linpix\w+)` \| (.+) \|$", (ROOT / "docs" / "operate.md").read_text(), re.MULTILINE
    )
)


def promtool(asked: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; on Debian and Ubuntu: apt-get install prometheus")
    return ran("promtool", asked, cwd=ROOT)


def test_every_alert_fires_when_it_should_and_then_only():
    tested = promtool("test rules tests/server/alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_prometheus_loads_the_rules_where_the_stack_puts_them():
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    checked = promtool("check config deploy/prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout
    mounts = dict(
        mount.split(":")[:2]
        for mount in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][
            "prometheus"
        ]["volumes"]
    )
    assert mounts["./deploy/alerts.yml"] == "/etc/prometheus/alerts.yml"


def test_every_alert_has_a_line_of_the_readme_that_says_what_to_do_and_no_other_has():
    assert list(RUNBOOK) == NAMES
    for name, line in RUNBOOK.items():
        meaning, _, cure = line.partition(" | ")
        assert meaning and cure, name
