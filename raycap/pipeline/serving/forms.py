"""The bodies of requests and answers, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CAPTION = 1000  # characters of a caption to explain
Base64 = Annotated[str, Field(description="The bytes of an image file as base64.")]
Uri = Annotated[str, Field(max_length=4096, description="A path or s3:// URI below a prefix of --allow-uri.")]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, max_length=64, description="The model's name; by default the server's first model.")


class CaptionOptions(_Form):
    """The search of a request. Values that are not given are the model's."""

    beam_size: int | None = Field(None, ge=1)
    num_results: int = Field(1, ge=1, description="Captions per image.")
    max_length: int | None = Field(None, ge=3, le=10_000, description="Tokens per caption, with begin and end.")
    precision: Literal["float32", "bfloat16"] | None = None
    confidence: bool = Field(True, description="Whether the answer has confidences, for models that have them.")


class ExplainOptions(_Form):
    """What to explain of an image."""

    caption: str | None = Field(None, max_length=MAX_CAPTION, description="By default the model's best caption.")
    head: int | None = Field(None, ge=0, le=1000, description="Of the last decoder layer; by default the mean of all.")
    attribution: bool = Field(False, description="Also integrated gradients, which take minutes.")


class CaptionBody(CaptionOptions):
    """The JSON body of POST /caption."""

    images: list[Base64] = []
    uris: list[Uri] = []


class ExplainBody(ExplainOptions):
    """The JSON body of POST /explain, with one image."""

    images: list[Base64] = []
    uris: list[Uri] = []


class RankedEntry(BaseModel):
    caption: str
    log_prob: float


class CaptionEntry(BaseModel):
    """The captions of one image. log_prob: nats. The confidence is that in the best caption."""

    caption: str
    log_prob: float
    confidence: float | None = None
    expected_ciderd: float | None = None
    n_best: list[RankedEntry] | None = None


class ModelEntry(BaseModel):
    """What made an answer: the name by which it is served, its bundle's name, and the digest of its weights."""

    name: str
    bundle: str
    digest: str


class CaptionAnswer(BaseModel):
    model: ModelEntry
    captions: list[CaptionEntry]


class ExplainAnswer(BaseModel):
    """The maps have one row for each word, over the grid of rows x columns image tokens, row by row."""

    model: ModelEntry
    caption: str
    words: list[str]
    grid: tuple[int, int]
    attention: list[list[float]]
    attribution: list[list[float]] | None
    steps: int
    gap: float


class ModelsAnswer(BaseModel):
    default: str
    models: list[dict[str, Any]]


class Error(BaseModel):
    error: str
