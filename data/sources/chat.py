"""Conversations: rows -> messages -> the text of a chat template, in turns that are trained on or not."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from tril.data.settings import printable
from tril.data.sources.base import Document, Turn
from tril.data.sources.formats import encodable
from tril.data.sources.template import MEMORY, SECONDS, Messages, compile_template, within_limits

# Without a template of the model: text that every tokenizer has, and end-of-text after each answer. The space before an
# answer belongs to it, since byte-level BPE stores a space with the word after it.
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
ROLES = ("system", "user", "assistant")
ROW = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class ChatTemplate:
    """A Jinja template that turns messages into a text.

    Raises:
        ValueError: it cannot be compiled, or takes too long.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        if text != PLAIN and not within_limits(text):
            raise ValueError(f"{name} takes more than {SECONDS} s or {MEMORY >> 30} GB for two messages; use another")
        try:
            self._render = compile_template(text)
        except Exception as error:  # besides TemplateError, recursion and others of jinja2's parser
            raise ValueError(f"{name} is not a Jinja template ({printable(error)}); correct it") from error

    def render(self, messages: Messages, eos: str, where: str, *, generation: bool = False) -> str:
        """The text of messages; `generation`: up to where the next answer begins."""
        try:
            return self._render(messages, eos, generation)
        except Exception as error:  # whatever the code of a template raises
            cause = f"{self.name} refuses this conversation ({printable(error)})"
            raise ValueError(f"{where}: {cause}; change the row, or choose data.chat_template") from error

    def turns(self, messages: Messages, where: str, eot: str, special: Collection[str]) -> list[Turn]:
        """The rendered text in order; the assistant's answers, with the token that ends them, are targets.

        An answer is what the template adds to the text with which it asks for one. White space after the special token
        that ends it is no target. The last answer ends with a special token, by default `eot`.

        Args:
            where: file and line, for error messages.
            special: the special tokens of the tokenizer.

        Raises:
            ValueError: a message contains a special token, or the template changes earlier turns.
        """
        turns, done, reply = [], "", ""
        for i, message in enumerate(messages):
            if token := next((token for token in special if token in message["content"]), None):
                cause = f"messages[{i}].content contains the special token {token!r}, which would end or open a turn"
                raise ValueError(f"{where}: {cause}; remove it")
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], eot, where, generation=True)
            after = self.render(messages[: i + 1], eot, where)
            if not (before.startswith(done) and after.startswith(before)):
                cause = f"with messages[{i}], {self.name} changes the text before this answer"
                raise ValueError(f"{where}: {cause}, so its tokens are unknown; choose another data.chat_template")
            reply = after[len(before) :].rstrip()
            reply = reply if reply.endswith(tuple(special)) else after[len(before) :]
            turns += [Turn(before[len(done) :], False), Turn(reply, True), Turn(after[len(before + reply) :], False)]
            done = after
        if not reply.endswith(tuple(special)):
            turns.append(Turn(eot, True))
        return [turn for turn in turns if turn.text]


def conversation(name: str, row: Mapping[str, Any], template: ChatTemplate, where: str) -> Document:
    """The document of a row. System prompts and the words of a template are the same in many, so they are no key."""
    messages = read_messages(row, where)
    key = "\n".join(message["content"] for message in messages if message["role"] != "system").strip()
    text = template.render(messages, "", where)
    return Document(name, text, key, partial(template.turns, messages, where))


def read_messages(row: Mapping[str, Any], where: str) -> Messages:
    """The messages of a row, with role and content only: those of its key `messages`, else its `prompt` and `response`.

    Raises:
        ValueError: it has neither, or they are no conversation that ends with an answer.
    """
    messages = row.get("messages")
    if messages is None and ("prompt" in row or "response" in row):
        roles = {"user": "prompt", "assistant": "response"}
        messages = [{"role": role, "content": row.get(key)} for role, key in roles.items()]
    if problem := _problem(messages):
        raise ValueError(f"{where}: {problem}; write prompt and response, or {ROW}")
    assert messages is not None
    return [{"role": message["role"], "content": encodable(message["content"])} for message in messages]


def _problem(messages: Any) -> str | None:
    """Why messages are no conversation that ends with an answer."""
    if not isinstance(messages, list) or not messages:
        return "messages must be a list and not empty"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"messages[{i}] must be an object with role and content"
        role, content = message["role"], message["content"]
        if role not in ROLES or role == "system" and i:
            return f"messages[{i}].role={printable(role)} must be one of {', '.join(ROLES)}, and system the first"
        if not isinstance(content, str) or not content.strip() and role != "system":
            return f"messages[{i}].content must be a text and not empty"
    return None if messages[-1]["role"] == "assistant" else "the last message must be of the assistant"
