"""Settings: names, aliases and empty variables."""

import json

import pytest

from linpix.server.settings import Settings, misspelt, names_of


@pytest.mark.parametrize("text", ["a", "a=", "=b", "a=b,a=c"])
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


def test_a_misspelt_variable_is_reported_with_the_nearest_setting():
    names = "LINPIX_MODLES", "LINPIX_MODELS", "LINPIX_MIRRORS", "LINPIX_PORT_8000_TCP", "HOME"
    [told] = misspelt(dict.fromkeys(names, "x"))
    assert told == "LINPIX_MODLES is not a setting, so it has no effect; did you mean LINPIX_MODELS?"
    assert "linpix serve --help" in misspelt({"LINPIX_COFFEE_COLOUR_XYZ": ""})[0]


@pytest.mark.parametrize(("field", "value"), [
    ("allowed_hosts", "http://pix.example"), ("allowed_hosts", "pix.example:80"), ("allowed_hosts", "pix/example"),
    ("allowed_hosts", "pix.*"), ("allowed_origins", "*"), ("allowed_origins", "null"),
    ("allowed_origins", "app.example.com"), ("allowed_origins", "https://app.example.com/"),
    ("allowed_origins", "https://app.example.com/path"), ("allowed_origins", "https://a@app.example.com"),
    ("allowed_origins", "https://")])
def test_a_setting_that_names_no_host_or_origin_is_refused(field, value):
    with pytest.raises(ValueError, match=r"such as|list the origins"):
        Settings(**{field: value})


def test_an_empty_variable_counts_as_unset_except_the_one_of_the_keys(monkeypatch):
    for name in ("LINPIX_METRICS_PORT", "LINPIX_CHECKPOINTS", "LINPIX_MODELS"):
        monkeypatch.setenv(name, "")
    settings = Settings()
    assert (settings.metrics_port, settings.checkpoints, settings.models) == (None, None, "")
    monkeypatch.setenv("LINPIX_API_KEYS", "")
    with pytest.raises(ValueError, match="give a file of keys; or leave the setting out"):
        Settings()


@pytest.mark.slow
def test_only_the_flag_for_faults_is_hidden():
    described = Settings.model_json_schema()["properties"]
    assert json.dumps(described["faults"]).count("hidden") == 1
    assert not any("hidden" in value for name, value in described.items() if name != "faults")
