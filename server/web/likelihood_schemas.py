"""The answer of /v1/images/likelihoods. The examples are of the shipped `mnist-small`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from . import fields
from .schemas import Conditioning

_Nats = Annotated[float, Field(description="natural logarithm of the probability of the counted sub-pixels",
                               examples=[-457.6])]
_Bits = Annotated[float, Field(description="mean number of bits over the counted sub-pixels; 8 is a uniform guess, and "
                               "lower is more probable", examples=[0.842])]


class ClassLikelihood(BaseModel):
    """How probable the picture is as one of this class."""

    label: str = Field(description="name of the class", examples=["7"])
    posterior: float = Field(ge=0, le=1, description="probability of the class after the counted sub-pixels were seen, "
                             "if all classes are equally probable before", examples=[0.992])
    log_likelihood: _Nats
    bits_per_dim: _Bits


class Source(BaseModel):
    """By what a likelihood was computed."""

    created: int = Field(description="time of the answer, seconds since 1970", examples=[1795303560])
    model: fields.Name
    checkpoint: fields.Digest
    precision: Literal["fp32"] = Field("fp32", description="always fp32: likelihoods are computed by torch in float32, "
                                       "whatever precision the model draws with")
    warnings: list[str] = Field(description="parts of the request that were ignored, or that had no effect",
                                examples=[[]])


class Scores(BaseModel):
    """A likelihood, for the whole picture, by class and by sub-pixel."""

    label: str | None = Field(description="class that the model assumed; null: no class; with labels=all, or with a "
                              "model that draws the class first: the mixture of all classes", examples=["7"])
    counted: int = Field(description="number of hidden sub-pixels; without transparency, mask and keep_rows, all are "
                                     "hidden",
                         examples=[784])
    log_likelihood: _Nats
    bits_per_dim: _Bits
    labels: list[ClassLikelihood] | None = Field(description="every class, the most probable first; null without "
                                                 "labels=all")
    map: list[list[list[float | None]]] = Field(
        description="bits of each sub-pixel given the ones before it, by image row, pixel and channel; null for known "
                    "sub-pixels; their sum is -log_likelihood / ln 2",
        examples=[[[[0.001], [3.25]], [[None], [0.5]]]])
    b64_json: str | None = Field(description="the map as a PNG in base64: the mean over channels, from black for 0 "
                                 "bits to white for 8 bits or more; transparent for known pixels; null unless "
                                 "response_format is b64_json",
                                 examples=["iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAQAAAB..."])


class Likelihoods(Scores, Conditioning, Source):  # fields are sent in the order of the bases, the last one first
    """How probable the hidden part of a picture is, given the known part."""
