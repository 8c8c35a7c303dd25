"""OpenAI's request and response bodies, with vLLM's extra sampling fields.

Source: OpenAI's public API reference and vLLM's documentation of its extra parameters. These are the fields that are
read; `request_fields.py` has the others, which are noted as without effect or refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    StrictStr,
    Tag,
    computed_field,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from vllm.entrypoints.openai.request_fields import take_fields
from vllm.outputs import Logprob

MAX_STOPS = 16
# What the engine's arrays hold.
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Float32 = Annotated[float, Field(ge=-3e38, le=3e38)]
TokenIds = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]


class Fields(BaseModel):
    """An object of a request. A null stands for the default; fields that are not read are noted, or refused."""

    model_config = ConfigDict(allow_inf_nan=False)
    prefix: ClassVar[str] = ""  # where in a request the object is

    _without_effect: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _take(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(body, dict):
            raise ValueError("it must be a JSON object")
        kept, ignored, refused = take_fields(body, cls.model_fields, cls.prefix)
        if refused:
            problems = [_refusal(name, body[name], reason) for name, reason in refused.items()]
            raise ValidationError.from_exception_data(cls.__name__, problems)
        taken = handler(kept)
        taken._without_effect = ignored
        return taken

    def without_effect(self) -> list[str]:
        """The fields that were given and change nothing."""
        return self._without_effect


def _refusal(name: str, value: Any, reason: str) -> InitErrorDetails:
    error = PydanticCustomError("not_supported", "this server cannot act on it: {reason}", {"reason": reason})
    return InitErrorDetails(type=error, loc=(name,), input=value)


class StreamOptions(Fields):
    """`include_usage`: one more chunk at the end, without choices, has the numbers of tokens."""

    prefix = "stream_options."

    include_usage: bool = False


class RequestBody(Fields):
    """The JSON of a request."""

    model: str | None = None


class GenerationRequest(RequestBody):
    """The fields of both kinds of completion; None means the server's default (`generation_config`)."""

    max_tokens: Int64 | None = None
    n: Int64 | None = Field(None, ge=1)
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    logit_bias: dict[str, Float32] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: Int64 | None = None
    min_p: Float32 | None = None
    repetition_penalty: Float32 | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    bad_words: Annotated[list[str], Field(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Int64 | None = Field(None, ge=0)
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Int64 = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not for stream=true")
        return self

    def without_effect(self) -> list[str]:
        options = [] if self.stream_options is None else self.stream_options.without_effect()
        return super().without_effect() + options


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. A prompt is text or token ids; several are answered by n choices each, in order."""

    prompt: StrictStr | TokenIds | list[StrictStr] | list[TokenIds]
    logprobs: Annotated[int | None, Field(ge=0), BeforeValidator(_none_for_false)] = None
    echo: bool = False
    best_of: Int64 | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of={self.best_of} is not supported: ask for n and choose")
        return self


class TextPart(Fields):
    """A piece of a message's content; only text."""

    prefix = "messages.content."

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message; fields beside these go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: StrictStr | list[TextPart] | None = None


class Conversation(RequestBody):
    """Messages that a chat template makes a prompt of; `chat_template` is the text of another than the server's."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        if value not in (None, "auto", "none"):
            raise ValueError("this server cannot act on it: the model decides what it calls, so take 'auto' or 'none'")
        return value

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """What the template shows the model; None where it is to call nothing."""
        return None if self.tool_choice == "none" else self.tools or None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    def without_effect(self) -> list[str]:
        parts = [part for message in self.messages if isinstance(message.content, list) for part in message.content]
        return super().without_effect() + list({name: None for part in parts for name in part.without_effect()})


class ChatCompletionRequest(Conversation, GenerationRequest):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeCompletionRequest(RequestBody):
    """Body of /tokenize with a text."""

    prompt: StrictStr
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeChatRequest(Conversation):
    """Body of /tokenize with a conversation."""

    return_token_strs: bool = False


def _kind_of_tokenize(body: Any) -> str:
    return "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"


TokenizeRequest = Annotated[
    Annotated[TokenizeCompletionRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(_kind_of_tokenize),
]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Body of /detokenize."""

    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class UsageInfo(BaseModel):
    """Tokens of all prompts, each counted once, and of all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogProbs(BaseModel):
    """Parallel lists, one entry a token; text_offset counts characters from the start of the choice's text."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(BaseModel):
    """What the choices of all answers have."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # with `return_token_ids`


class Answer(BaseModel):
    """What all answers, and chunks of streamed ones, have."""

    id: str
    created: int
    model: str
    usage: UsageInfo | None = None


PromptLogprobs = list[dict[int, Logprob] | None]  # per token, by token id; None for the first


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogProbs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None  # with `return_token_ids`; in a stream in a choice's first chunk


class CompletionResponse(Answer):
    """An answer of /v1/completions, or a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class PositionLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob] = []


class ChoiceLogprobs(BaseModel):
    content: list[PositionLogprobs]


class ToolCall(BaseModel):
    """A call that the model wrote; `index` is its place, in a stream."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: dict[str, str]  # name and arguments

    @model_serializer(mode="wrap")
    def _present(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Written(BaseModel):
    """What a model wrote, or a chunk of it: with a reasoning parser `reasoning` is its thought."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reasoning_content(self) -> str | None:
        """The name that vLLM had before, and DeepSeek's API has."""
        return self.reasoning


class AssistantMessage(Written):
    role: Literal["assistant"] = "assistant"


class DeltaMessage(Written):
    """What a chunk adds to a message; clients look at which keys there are."""

    role: Literal["assistant"] | None = None

    @model_serializer(mode="wrap")
    def _present(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: part for name, part in dump(self).items() if part is not None}


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None


class ChatCompletionResponse(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None  # with `return_token_ids`


class ChatStreamChoice(Choice):
    delta: DeltaMessage
    logprobs: ChoiceLogprobs | None = None


class ChatCompletionStreamResponse(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatStreamChoice]
    prompt_token_ids: list[int] | None = None  # of the first chunk, with `return_token_ids`
