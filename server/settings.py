"""The service's settings: flags of `linpix serve`, or LINPIX_* variables, with one default, unit and reason each."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.faults import parse
from server.origins import Hosts, Origins

HIDDEN: JsonDict = {"hidden": True}  # from --help


class Settings(BaseSettings):
    """Every field is a flag (`--max-queue`) and a variable (`LINPIX_MAX_QUEUE`); flags win."""

    model_config = SettingsConfigDict(env_prefix="LINPIX_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 lets the system choose")
    models: str = Field("", description="comma-separated models, the first is the default; empty: all checkpoints")
    checkpoints: Path | None = Field(None, description="folder of checkpoints, read again after SIGHUP; default: "
                                     "that of the checkout")
    slots: int = Field(64, ge=1, le=10_000_000, description="images in flight per linear model, each with its state")
    softmax_slots: int = Field(8, ge=1, le=10_000, description="images in flight per softmax model, whose state is big")
    max_queue: int = Field(256, ge=0, description="images that may wait for a slot, per model")
    max_n: int = Field(16, ge=1, le=1024, description="largest n of one request")
    client_images: int = Field(256, ge=0, description="images that one client may have waiting or running; 0: any")
    max_requests: int = Field(512, ge=0, description="requests whose bodies are read at once; 0: any number")
    head_timeout: float = Field(20.0, gt=0, description="seconds that the head of a request may take to arrive")
    body_timeout: float = Field(60.0, gt=0, description="seconds that a request's body may take to arrive")
    max_upload: int = Field(16 * 2**20, ge=1024, description="largest request body, bytes")
    upload_space: int = Field(384 * 2**20, ge=1024, description="bytes that all uploads under way may take together, "
                              "in memory and in the folder for temporary files; one client may have a quarter of them, "
                              "or --max-upload if that is more")
    drain_timeout: float = Field(30.0, ge=0, description="seconds that admitted requests may take after SIGTERM, until "
                                 "they end with an error; a second SIGTERM ends them at once")
    request_timeout: float = Field(600.0, gt=0, description="seconds from a request's admission to its end, at most")
    watchdog_timeout: float = Field(60.0, gt=0, le=86_400, description="seconds without a sign of life until an engine "
                                    "with work counts as hung, and the process ends; in a comparison ten times as many")
    compare_budget: float = Field(120.0, gt=0, le=3600, description="largest budget of a comparison over HTTP, seconds")
    engine: Literal["auto", "eager", "compiled"] = Field("auto", description="what decodes")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="of the matrix products")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where linear models decode")
    state: Literal["fp32", "fp16"] = Field("fp32", description="of the recurrent state on a GPU; fp16 wants --defer")
    defer: int = Field(1, ge=1, le=64, description="tokens that a GPU adds to the state together; 1: each at once")
    poison: bool = Field(False, description="debugging: fill freed slots with NaN, so that reading one shows")
    api_keys: Path | None = Field(None, description="file of keys, which linpix key makes, for its owner alone; "
                                  "without it no key is asked for")
    allowed_hosts: str = Field("", description="comma-separated names that clients may ask by, beside localhost and "
                               "the address listened on; *.example.com for all below one, * for any")
    allowed_origins: str = Field("", description="comma-separated origins whose pages may use the service, beside its "
                                 "own, such as https://app.example.com")
    trusted_proxies: str = Field("", description="comma-separated addresses or networks of proxies whose "
                                 "X-Forwarded-For and -Proto are believed")
    metrics_host: str = Field("127.0.0.1", description="address of --metrics-port")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="TCP port of /metrics, /healthz and /readyz, "
                                     "which are then only there; default: that of the service")
    log_format: Literal["text", "json"] = Field("text", description="of the log on standard error; json: an object a "
                                                "line")
    faults: str = Field("", json_schema_extra=HIDDEN, description="what goes wrong on purpose: server/faults.py")

    @field_validator("checkpoints", "metrics_port", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("api_keys", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if value == "":  # a variable that somebody forgot to fill must not let everybody in
            raise ValueError("name a file of keys, or leave it out, and no key is asked for")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _names_hosts(cls, text: str) -> str:
        Hosts("", text)
        return text

    @field_validator("allowed_origins")
    @classmethod
    def _names_origins(cls, text: str) -> str:
        Origins(text)
        return text

    @field_validator("faults")
    @classmethod
    def _well_formed(cls, text: str) -> str:
        if text:
            parse(text)
        return text
