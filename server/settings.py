"""The service's settings: flags of `linpix serve`, LINPIX_* variables, or a file, with one default,
unit and reason each.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, SettingsConfigDict

from .fault_rules import parse
from .origins import Origins, check_proxies

# defaults: a GPU needs many
ON_GPU = {"slots": 1024, "max_queue": 2048, "max_n": 128, "client_images": 1024}
_ELSEWHERE = re.compile(  # variables of training, kernels and tests, and those that Kubernetes sets
    r"LINPIX_(MIRRORS|KERNEL|OVERLAP|TILES|DATA|GOLDEN|FORBID_SKIPS|(TEST|FUZZ)_.*|(.*_)?(SERVICE_(HOST|PORT)|PORT_\d).*)"
)


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """A sentence about each LINPIX_* variable that has no effect, so that a misspelt name does not
    go unnoticed.
    """
    known = [f"LINPIX_{name.upper()}" for name in Settings.model_fields]
    found = []
    for name, flag in (("LINPIX_PORT", "--port"), ("LINPIX_METRICS_PORT", "--metrics-port")):
        port = environment.get(name)
        if _of_kubernetes(port):
            found.append(
                f"the port {port} in the environment has no effect, since Kubernetes sets it for a"
                f" Service; set enableServiceLinks: false in the pod, or the port by {flag}"
            )
    for name in sorted(environment):
        if (
            name.startswith("LINPIX_")
            and name not in known
            and not _ELSEWHERE.fullmatch(name)
            and not _of_kubernetes(environment[name])
        ):
            near = difflib.get_close_matches(name, known, 1)
            cure = f"did you mean {near[0]}?" if near else "linpix serve --help lists them"
            found.append(f"{name} is not a setting, so it has no effect; {cure}")
    return found


def from_file(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a TOML file, without those that a variable sets. Raises OSError, or
    ValueError with the cure.
    """
    from linpix.model import toml  # it comes with torch, which --help does not need

    found = {}
    for name, value in toml.read(path, Settings.model_fields, "linpix serve").items():
        variable = environment.get(f"LINPIX_{name.upper()}")
        if not variable or _of_kubernetes(variable):
            found[name] = value
    return found


def names_of(text: str) -> dict[str, str]:
    """NAME=MODEL pairs, comma-separated. Raises ValueError for anything else, or a name that is
    given twice or that an answer could not show.
    """
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, model = (part.strip() for part in pair.partition("="))
        if not (name.isprintable() and name and equals and model) or name in found:
            raise ValueError(
                "give NAME=MODEL, comma-separated and each NAME once, in printable characters, such"
                " as gpt-image-1=mnist-small"
            )
        found[name] = model
    return found


def _of_kubernetes(value: object) -> bool:
    """Whether this is what Kubernetes sets LINPIX_PORT to in pods beside a Service named linpix, or
    METRICS_PORT beside linpix-metrics."""
    return isinstance(value, str) and value.startswith("tcp://")


def _in_units(kind: str, units: dict[str, float]) -> BeforeValidator:
    """A validator for a number with or without units, such as 90, 90s or 1m30s. kind: what a bare
    number is, for messages."""
    factors = {unit.lower(): factor for unit, factor in units.items()}
    term = rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(factors)})\s*"

    def number(value: object) -> object:
        if not isinstance(value, str):
            return value
        if re.fullmatch(f"({term})+", value.strip().lower()):
            total = sum(
                float(number) * factors[unit] for number, unit in re.findall(term, value.lower())
            )
            return total if kind == "seconds" else round(min(total, 2.0**62))
        try:
            float(value)
        except ValueError:
            raise ValueError(
                f"must be a number of {kind}, or have a unit: {', '.join(units)}"
            ) from None
        return value

    return BeforeValidator(number)


def _joined(value: object) -> object:
    """A comma-separated list, from one or more of them, without spaces, empty and repeated
    parts.
    """
    given: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in given):
        return value
    return ",".join(
        dict.fromkeys(part.strip() for part in ",".join(given).split(",") if part.strip())
    )


def _path(path: str) -> str:
    if not re.fullmatch(r"(/(?!\.\.?(/|$))[\w.~-]+)*/*", path):
        raise ValueError("must begin with a slash, such as /pix, and have neither .. nor escapes")
    return path.rstrip("/")


SECONDS = _in_units("seconds", {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3600})
BYTES = _in_units(
    "bytes",
    {
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "Ki": 2**10,
        "Mi": 2**20,
        "Gi": 2**30,
    },
)  # no M, which means either
LIST = BeforeValidator(_joined)  # a flag of it may be given several times
Seconds = Annotated[float, SECONDS]
Bytes = Annotated[int, BYTES]
Listed = Annotated[str, LIST]
Address = Annotated[str, AfterValidator(lambda host: host.strip("[]"))]  # brackets are for URLs
HIDDEN: JsonDict = {"hidden": True}  # from --help


class Settings(BaseSettings):
    """Every field is a flag (`--max-queue`), a variable (`LINPIX_MAX_QUEUE`) and a name in a file
    (`max_queue`); flags win, then variables. The text below it describes it.
    """

    model_config = SettingsConfigDict(
        env_prefix="LINPIX_", extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    host: Address = "127.0.0.1"
    """address to listen on; 0.0.0.0 for every interface, :: for IPv6 too"""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 lets the system choose"""
    root_path: Annotated[str, AfterValidator(_path)] = ""
    """path under which a proxy serves all of this, such as /pix; if the proxy removes the path
    from requests, only the picture of links to the page needs it"""
    models: Listed = ""
    """comma-separated models to serve; the first is the default; empty: all checkpoints"""
    alias: Listed = ""
    """other names that clients may use for models, comma-separated, such as
    gpt-image-1=mnist-small; for tools with a fixed model name"""
    checkpoints: Path | None = None
    """folder of checkpoints, read again on SIGHUP; default: checkpoints/ in the source tree"""
    plugin: Listed = ""
    """comma-separated modules, or .py files, that register kinds of attention or feature maps of
    the models"""
    slots: int = Field(64, ge=1, le=10_000_000)
    """images decoded at once per linear model; each has a state in memory; on a GPU 1024"""
    softmax_slots: int = Field(8, ge=1, le=10_000)
    """images decoded at once per softmax model, whose states are large"""
    max_queue: int = Field(256, ge=0)
    """images that may wait for a slot, per model; on a GPU 2048"""
    max_n: int = Field(16, ge=1, le=1024)
    """largest n that a request may ask for; on a GPU 128"""
    client_images: int = Field(256, ge=0)
    """images that one client may have waiting or running; on a GPU 1024; 0: no limit"""
    max_requests: int = Field(512, ge=0)
    """largest number of request bodies that are read at once; 0: no limit"""
    head_timeout: Seconds = Field(20.0, gt=0)
    """time within which the head of a request must arrive"""
    body_timeout: Seconds = Field(60.0, gt=0)
    """time within which the body of a request must arrive"""
    max_upload: Bytes = Field(16 * 2**20, ge=1024)
    """largest request body"""
    upload_space: Bytes = Field(384 * 2**20, ge=1024)
    """space that all current uploads and unread answers together may use, in memory and in the
    folder for temporary files; one client may use a quarter of this, or --max-upload if that is
    more"""
    drain_timeout: Seconds = Field(30.0, ge=0)
    """time that admitted requests have to finish after SIGTERM, before they get an error; a second
    SIGTERM ends them at once"""
    request_timeout: Seconds = Field(600.0, gt=0)
    """longest time for a request; a request may set a shorter one"""
    watchdog_timeout: Seconds = Field(60.0, gt=0, le=86_400)
    """time without a heartbeat before a busy engine counts as hung and the process exits; ten times
    as long during a comparison"""
    compare_budget: Seconds = Field(120.0, gt=0, le=3600)
    """longest comparison that may be requested over HTTP"""
    engine: Literal["auto", "eager", "compiled"] = "auto"
    """engine of linear models: torch (eager) or the kernels of csrc/ (compiled); auto: compiled if
    it can run the model"""
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """precision of matrix products; auto: bf16 if the hardware has instructions for it, else fp32;
    int8: faster on a CPU, with slightly worse likelihoods"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device on which linear models decode; auto: a GPU if there is one"""
    state: Literal["fp32", "fp16"] = "fp32"
    """precision of the recurrent state on a GPU"""
    poison: bool = False
    """for debugging: fill freed slots with NaN, which makes it visible if one is read"""
    api_keys: Path | None = None
    """file of API keys, made with `linpix key`, with mode 600; if unset, no key is required"""
    allowed_hosts: Listed = ""
    """host names to accept besides localhost and the listening address, comma-separated;
    *.example.com for subdomains, * for any"""
    allowed_origins: Listed = ""
    """other origins whose pages may use the service, comma-separated, such as
    https://app.example.com"""
    trusted_proxies: Listed = ""
    """addresses or networks of proxies whose X-Forwarded-For, X-Forwarded-Proto, X-Request-Id and
    traceparent headers are trusted, comma-separated; * for any"""
    tls_cert: Path | None = None
    """certificate, in PEM with those that it depends on, to serve HTTPS without a proxy; needs
    --tls-key; read at the start"""
    tls_key: Path | None = None
    """private key of --tls-cert, in PEM"""
    metrics_host: Address = "127.0.0.1"
    """address to listen on with --metrics-port"""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """separate TCP port for /metrics, /healthz and /readyz; default: they are on the service's
    port"""
    metrics_targets: Path | None = None
    """with --replicas: folder in which each process writes the address of its metrics, for
    Prometheus (file_sd_configs)"""
    replicas: int = Field(0, ge=0, le=1024)
    """number of engines in separate processes, run by Ray Serve (pip install '.[ray]'); 0: one
    engine, in the server's process"""
    fronts: int = Field(1, ge=1, le=1024)
    """with --replicas: number of processes that answer HTTP, all on one port"""
    replica_threads: int = Field(0, ge=0, le=4096)
    """with --replicas: threads per replica, on separate cores if there are enough; 0: number of
    cores divided by number of replicas"""
    log_format: Literal["text", "json"] = "text"
    """format of the log on standard error; json: one object per line"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least severe messages to log; debug: also probes, scrapes, files of the page, and requests
    for /v1/status"""
    faults: str = Field("", json_schema_extra=HIDDEN)
    """for tests: faults to inject, as described in server/fault_rules.py"""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        from linpix.model import ops  # torch, which --help does not need

        used: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, str):
                value = value.strip()  # as \r\n
            empty = value == "" and name != "api_keys"  # as if unset
            if empty or (name in ("port", "metrics_port") and _of_kubernetes(value)):
                continue
            field = cls.model_fields.get(name)
            if field and get_origin(field.annotation) is Literal and isinstance(value, str):
                value = value.lower()
            used[name] = value
        on_cpu = (
            used.get("device") == "cpu"
            or used.get("engine") == "eager"
            or used.get("precision") == "int8"
        )
        if ops.gpu and not on_cpu:
            return ON_GPU | used
        return used

    @field_validator("api_keys", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if value == "":  # a variable that was left empty by mistake must not let everybody in
            raise ValueError(
                "give a file of keys; or leave the setting out, and no key is required"
            )
        return value

    @field_validator("alias", "allowed_hosts", "allowed_origins", "trusted_proxies", "faults")
    @classmethod
    def _well_formed(cls, text: str, info: ValidationInfo) -> str:
        checks: dict[str | None, Callable[[str], object]] = {
            "alias": names_of,
            "allowed_hosts": lambda names: Origins("", names),
            "allowed_origins": lambda origins: Origins("", "", origins),
            "trusted_proxies": check_proxies,
            "faults": lambda rules: rules and parse(rules),
        }
        checks[info.field_name](text)
        return text

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("a certificate needs its key: give both --tls-cert and --tls-key")
        return self

    def toml(self) -> str:
        """The settings as a file of --config; those without a value are comments."""
        from linpix.model import toml

        lines = []
        for name, value in self:
            field = type(self).model_fields[name]
            if field.json_schema_extra == HIDDEN and value == field.default:
                continue
            lines.append(toml.line(name, value))
        return "".join(lines)

    def idle(self) -> list[str]:
        """A sentence about each setting that has no effect without another one."""
        needs = {
            "fronts": "replicas",
            "replica_threads": "replicas",
            "metrics_targets": "replicas",
            "metrics_host": "metrics_port",
        }
        given = {
            name
            for name, field in Settings.model_fields.items()
            if getattr(self, name) != field.default
        }
        return [
            f"--{name} has no effect without --{other}".replace("_", "-")
            for name, other in needs.items()
            if name in given and other not in given
        ]

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def aliases(self) -> dict[str, str]:
        """The model that each alias stands for."""
        return names_of(self.alias)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of settings, such as max_queue = 512; flags and variables win",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings as such a file, and do not serve",
    )
    for name, field in Settings.model_fields.items():
        kind, default = name.upper(), field.default
        if get_origin(field.annotation) is Literal:
            kind = "|".join(get_args(field.annotation))
        elif SECONDS in field.metadata:
            kind, default = "TIME", f"{default:g}s"
        elif BYTES in field.metadata:
            kind, default = "SIZE", f"{default >> 20}MiB"
        default = "" if field.default in (None, "") else f"default: {default}; "
        text = f"{field.description} ({default}LINPIX_{name.upper()})"
        if field.json_schema_extra == HIDDEN:
            text = argparse.SUPPRESS
        action = "append" if LIST in field.metadata else "store"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=kind, action=action, help=text)
    # defaults are in the texts; None: the variable decides
    parser.formatter_class = argparse.HelpFormatter
    parser.epilog = (
        "TIME: seconds, or a number with a unit (500ms, 90s, 2m, 1h, 1m30s). SIZE: bytes, or a"
        " number with a unit (16MiB, 1.5GiB, 500MB). A comma-separated list may be given in several"
        " flags."
    )
