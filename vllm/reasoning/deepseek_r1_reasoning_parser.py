"""The thought of DeepSeek-R1, Qwen3 and their kin: the text between <think> and </think>."""

from __future__ import annotations

from vllm.utils.markers import num_begun

START, END = "<think>", "</think>"


class DeepSeekR1ReasoningParser:
    """Divides the text of one sample, which may come in pieces cut anywhere.

    The model thinks from its first token on, whether it writes <think> itself or its chat template ends with it.
    Everything before </think> is the thought, all of the text when </think> never comes; what follows is the answer.
    A model whose prompt ends with </think> has no thought. The tags are in neither; white space stays as it is.
    """

    tags = (START, END)
    always_thinks = True

    def __init__(self, prompt: str, written: str = "") -> None:
        """`written` is the part of the sample's message that the prompt holds, when a message is continued."""
        self._has_started = False  # past the place of <think>
        self._is_opened = self.always_thinks or prompt.rstrip().endswith(START)
        self.is_answering = prompt.rstrip().endswith(END) or END in written  # the thought has ended
        self._pending = ""  # may be the beginning of a tag

    def extract(self, text: str, is_last: bool = True) -> tuple[str, str]:
        """Take the next piece; returns what it adds to (thought, answer)."""
        if self.is_answering:
            return "", text
        text, self._pending = self._pending + text, ""
        if not self._has_started:
            begin = text.lstrip()[: len(START)]
            if not is_last and begin != START and START.startswith(begin):
                self._pending = text
                return "", ""
            self._has_started = True
            if begin != START and not self._is_opened:
                self.is_answering = True
                return "", text
            text = text.lstrip().removeprefix(START) if begin == START else text
        thought, end, answer = text.partition(END)
        if end:
            self.is_answering = True
        elif not is_last:
            held = num_begun(thought, END)
            thought, self._pending = thought[: len(thought) - held], thought[len(thought) - held :]
        return thought, answer


class Qwen3ReasoningParser(DeepSeekR1ReasoningParser):
    """The same of a model that may also answer at once: it thinks where <think> begins its text or ends its prompt."""

    always_thinks = False
