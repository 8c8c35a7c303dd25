"""/tokenize and /detokenize."""

from __future__ import annotations

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat


class OpenAIServingTokenization:
    """Shows the tokens that a text or a conversation is for the model."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        self.chat = chat

    async def create_tokenize(self, body: TokenizeCompletionRequest | TokenizeChatRequest) -> TokenizeResponse:
        self.chat.check_model(body.model)
        return await self.chat.off_loop(lambda: self._tokenized(body))

    async def create_detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        self.chat.check_model(body.model)
        return await self.chat.off_loop(lambda: DetokenizeResponse(prompt=self._text(body.tokens)))

    def _tokenized(self, body: TokenizeCompletionRequest | TokenizeChatRequest) -> TokenizeResponse:
        chat = self.chat
        if isinstance(body, TokenizeChatRequest):
            tokens = chat.encode(chat.render(body), bool(body.add_special_tokens))
        else:
            tokens = chat.encode(body.prompt, body.add_special_tokens is not False)
        strings = chat.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return TokenizeResponse(count=len(tokens), max_model_len=chat.max_model_len, tokens=tokens, token_strs=strings)

    def _text(self, tokens: list[int]) -> str:
        size = len(self.chat.tokenizer)
        outside = [token for token in tokens if token >= size]
        if outside:
            raise ApiError(400, f"token id {outside[0]} is outside of the tokenizer's {size}", "tokens")
        return str(self.chat.tokenizer.decode(tokens))
