"""Settings: names, units, lists, and values that could have no effect."""

import json
import os
import re
from typing import Literal, get_args, get_origin

import pytest

from linpix.model import ops
from linpix.server.settings import BYTES, SECONDS, Settings, from_file, misspelt, names_of

KINDS = {name: field.annotation for name, field in Settings.model_fields.items()}


@pytest.mark.parametrize("text", ["a", "a=", "=b", "a=b,a=c", "\udce9=b", "a\n=b,x\0=c"])
def test_an_alias_is_a_name_and_a_model(text):
    with pytest.raises(ValueError, match="NAME=MODEL"):
        names_of(text)
    assert names_of(" a = b ,") == {"a": "b"}


def test_the_port_that_kubernetes_names_a_service_by_is_not_the_port_to_listen_on(monkeypatch):
    monkeypatch.setenv("LINPIX_PORT", "tcp://10.96.0.12:80")
    assert Settings().port == 8000
    [told] = misspelt({"LINPIX_PORT": "tcp://10.96.0.12:80"})
    assert "enableServiceLinks: false" in told
    assert not misspelt({"LINPIX_PORT": "8810"})


def test_what_kubernetes_sets_for_services_of_like_names_is_no_setting_and_no_mistake(monkeypatch):
    # of a Service named linpix-metrics
    monkeypatch.setenv("LINPIX_METRICS_PORT", "tcp://10.96.0.12:80")
    assert Settings().metrics_port is None
    links = {
        "LINPIX_METRICS_PORT": "tcp://10.96.0.12:80",
        "LINPIX_METRICS_SERVICE_HOST": "10.96.0.12",
        "LINPIX_METRICS_PORT_80_TCP_ADDR": "10.96.0.12",
        "LINPIX_WEB_PORT": "tcp://10.96.0.13:80",
        "LINPIX_WEB_SERVICE_PORT_HTTP": "80",
    }
    [told] = misspelt(links)
    assert "--metrics-port" in told


def test_a_misspelt_variable_is_reported_with_the_nearest_setting():
    names = "LINPIX_MODLES", "LINPIX_MODELS", "LINPIX_MIRRORS", "LINPIX_PORT_8000_TCP", "HOME"
    [told] = misspelt(dict.fromkeys(names, "x"))
    assert (
        told == "LINPIX_MODLES is not a setting, so it has no effect; did you mean LINPIX_MODELS?"
    )
    assert "linpix serve --help" in misspelt({"LINPIX_COFFEE_COLOUR_XYZ": ""})[0]


@pytest.mark.parametrize("name", [name for name in KINDS if get_origin(KINDS[name]) is Literal])
def test_one_of_few_values_may_be_written_in_any_case(name, monkeypatch):
    for value in get_args(KINDS[name]):
        for written in (value.upper(), value.title(), f" {value} "):
            assert getattr(Settings(**{name: written}), name) == value
            monkeypatch.setenv(f"LINPIX_{name.upper()}", written)
            assert getattr(Settings(), name) == value
    with pytest.raises(ValueError, match=name):
        Settings(**{name: "NONE"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("5s", 5),
        ("2m", 120),
        ("2 min", 120),
        ("1h", 3600),
        ("1m30s", 90),
        ("1.5h", 5400),
        ("5S", 5),
    ],
)
def test_a_time_is_seconds_or_has_units(text, seconds):
    assert Settings(drain_timeout=text).drain_timeout == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("32MiB", 2**25),
        ("1.5gib", 3 * 2**29),
        ("64 KiB", 2**16),
        ("16MB", 16_000_000),
        ("2kB", 2000),
        ("16Mi", 2**24),
        ("1GiB512MiB", 3 * 2**29),
    ],
)
def test_a_size_is_bytes_or_has_units(text, size):
    assert Settings(max_upload=text).max_upload == size


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("root_path", "pix", "begin with a slash"),
        ("root_path", "/a/../b", "neither .. nor escapes"),
        ("drain_timeout", "5 parsecs", "number of seconds, or have a unit: ms, s, min, m, h"),
        ("drain_timeout", "-5s", "number of seconds"),
        ("drain_timeout", "s", "number of seconds"),
        ("head_timeout", "0ms", "greater than 0"),
        ("watchdog_timeout", "25h", "less than or equal to 86400"),
        (
            "max_upload",
            "16M",
            "number of bytes, or have a unit: kB, MB, GB, KiB, MiB, GiB, Ki, Mi, Gi",
        ),
        ("max_upload", "1kB", "greater than or equal to 1024"),
        ("upload_space", "16MiBs", "number of bytes"),
    ],
)
def test_what_is_not_a_time_or_a_size_is_refused_with_the_units(field, value, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        Settings(**{field: value})


def test_every_setting_with_a_unit_of_time_or_space_takes_units():
    taking = {
        name
        for name, field in Settings.model_fields.items()
        if {SECONDS, BYTES} & set(field.metadata)
    }
    endings = ("_timeout", "_budget", "_upload", "_space")
    assert taking == {name for name in Settings.model_fields if name.endswith(endings)}


def test_the_brackets_of_an_address_are_for_urls():
    settings = Settings(host="[::]", metrics_host="[::1]")
    assert (settings.host, settings.metrics_host) == ("::", "::1")


@pytest.mark.parametrize(
    "given", ["a,b,c", "a,b,c,b", " a, b,,c ,", ["a", "b,c"], ["a,", ",b", "c"]]
)
def test_a_list_has_no_empty_parts_and_adds_up(given):
    assert Settings(models=given).models == "a,b,c"


NEVER_MATCH = {
    "allowed_hosts": (
        "http://pix.example pix.example:80 pix/example pix.* .pix.example pix.example. "
        "*.10.0.0.5 10.0.0 *pix.example [::1]:80 10.0.0.0/8 b\u00fccher.example"
    ),
    "allowed_origins": (
        "* null app.example.com https://app.example.com/ https://app.example.com/path "
        "https://a@app.example.com https:// https://*.example.com "
        "https://app.example.com:* https://app.example.com:99999 "
        "https://b\u00fccher.example wss://app.example.com https://app.example.com?"
    ),
    "trusted_proxies": (
        "nginx localhost 10.0.0.0/33 10.0.0.5/8 10.0.0.5:80 [::1] 10.0.0.* *,10.0.0.5 "
        "0.0.0.0 ::ffff:10.0.0.5 10.0.0.1-10.0.0.9"
    ),
}
CASES = []
for field, values in NEVER_MATCH.items():
    CASES += [(field, value) for value in values.split()]


@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_setting_that_would_never_match_is_refused_with_an_example(field, value):
    with pytest.raises(ValueError, match=r"such as|list the origins"):
        Settings(**{field: f"{value},"})


@pytest.mark.parametrize(
    "value", ["10.0.0.5", "10.0.0.0/8, fd00::/8", "*", "::1,127.0.0.1", "0.0.0.0/0"]
)
def test_proxies_are_addresses_and_networks(value):
    assert Settings(trusted_proxies=value).trusted_proxies == value.replace(" ", "")


def test_an_empty_variable_counts_as_unset_except_the_one_of_the_keys(monkeypatch):
    usual = Settings().model_dump()
    for name in usual.keys() - {"api_keys"}:
        monkeypatch.setenv(f"LINPIX_{name.upper()}", "")
    assert Settings().model_dump() == usual
    monkeypatch.setenv("LINPIX_API_KEYS", "")
    with pytest.raises(ValueError, match="give a file of keys; or leave the setting out"):
        Settings()


def test_spaces_around_a_value_are_no_part_of_it(monkeypatch):
    """A file of variables that was written on Windows has a carriage return at the end of each."""
    usual = Settings().slots
    for name, value in (
        ("HOST", "::1"),
        ("LOG_LEVEL", "debug"),
        ("CHECKPOINTS", "/x"),
        ("PORT", "81"),
        ("SLOTS", ""),
    ):
        monkeypatch.setenv(f"LINPIX_{name}", f" {value}\r")
    found = Settings()
    assert (found.host, found.log_level, str(found.checkpoints), found.port) == (
        "::1",
        "debug",
        "/x",
        81,
    )
    assert found.slots == usual


def test_a_file_gives_settings_that_variables_and_flags_override(tmp_path, monkeypatch):
    file = tmp_path / "linpix.toml"
    file.write_text('max-queue = 7\nmodels = ["a", "b"]\nhead_timeout = "1m30s"\nslots = 3\n')
    monkeypatch.setenv("LINPIX_SLOTS", "5")
    monkeypatch.setenv("LINPIX_PORT", "tcp://10.96.0.12:80")  # of Kubernetes: no setting
    found = Settings(**from_file(file, os.environ) | {"max_n": 2})
    assert (found.max_queue, found.models, found.head_timeout, found.slots, found.max_n) == (
        7,
        "a,b",
        90,
        5,
        2,
    )
    file.write_text(found.toml())
    monkeypatch.delenv("LINPIX_SLOTS")
    assert Settings(**from_file(file, os.environ)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modles = 'a'", "modles is not a setting; did you mean models?"),
        ("port: 80", "linpix.toml is not TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, words):
    (tmp_path / "linpix.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        from_file(tmp_path / "linpix.toml", {})


def test_a_certificate_and_its_key_come_together():
    with pytest.raises(ValueError, match="give both --tls-cert and --tls-key"):
        Settings(tls_cert="a.pem")


def test_a_setting_that_needs_another_one_says_so():
    assert Settings(fronts=3, metrics_targets="x", metrics_host="::").idle() == [
        "--fronts has no effect without --replicas",
        "--metrics-targets has no effect without --replicas",
        "--metrics-host has no effect without --metrics-port",
    ]
    assert not Settings(fronts=3, replicas=2, metrics_host="::", metrics_port=0).idle()


@pytest.mark.slow
def test_only_the_flag_for_faults_is_hidden():
    described = Settings.model_json_schema()["properties"]
    assert json.dumps(described["faults"]).count("hidden") == 1
    assert not any("hidden" in value for name, value in described.items() if name != "faults")


def test_a_gpu_has_other_defaults_which_flags_and_variables_override(monkeypatch):
    monkeypatch.setattr(ops, "gpu", False)
    assert (Settings().slots, Settings().max_queue, Settings().max_n) == (64, 256, 16)
    monkeypatch.setattr(ops, "gpu", True)
    monkeypatch.setenv("LINPIX_MAX_N", "16")
    there = Settings(slots=7)
    assert (there.slots, there.max_queue, there.max_n, there.client_images) == (7, 2048, 16, 1024)
    for elsewhere in ({"device": "cpu"}, {"engine": "eager"}, {"precision": "int8"}):
        assert Settings(**elsewhere).slots == 64
