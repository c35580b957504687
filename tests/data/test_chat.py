"""Conversations: literal turns, transformers' own template code, and one line for each bad row."""

import json

import numpy as np
import pytest

from tests.data.chats import CHATML, MARKS
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.data.config import parse
from tril.data.prepare import Encoder
from tril.data.prepared import OPENS, TARGET
from tril.data.sources.base import Document, Piece, Turn
from tril.data.sources.chat import PLAIN, ChatTemplate, conversation
from tril.data.sources.files import Files

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "café?"},
    {"role": "assistant", "content": "Oui, é."},
]


def document(messages, template=PLAIN) -> Document:
    return conversation("1", {"messages": messages}, ChatTemplate(template, "the template"), "chat.jsonl, line 1")


def encoded(messages, template=PLAIN, marks=()):
    chat = document(messages, template)
    [found] = Encoder(byte_tokenizer(*marks), EOT, np.dtype(np.uint16)).encode([Piece(chat.text, True, chat.turns)])
    return found


def test_plain_turns_literally():
    assert document(TWO_TURNS).turns(EOT, {EOT}) == [
        Turn("System: Be brief.\n\nUser: 2+2?\n\nAssistant:", False),
        Turn(f" 4{EOT}", True),
        Turn("User: café?\n\nAssistant:", False),
        Turn(f" Oui, é.{EOT}", True),
    ]
    assert document(TWO_TURNS).text.startswith("System: Be brief.\n\nUser: 2+2?\n\nAssistant: 4User: caf")


def test_chat_template_as_in_transformers():
    """transformers renders, tokenizes and marks the answers; it counts the end of an answer, and not the line break."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer(*MARKS)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    expected = theirs.apply_chat_template(
        TWO_TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    found = encoded(TWO_TURNS, CHATML, MARKS)
    assert found.ids.tolist() == expected["input_ids"]
    assert (found.flags & TARGET).tolist() == expected["assistant_masks"]
    assert sum(expected["assistant_masks"]) == 2 + 9 and found.n_bytes == 1 + 8


def test_an_end_that_is_missing_is_added():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    chat = document(TWO_TURNS[1:3], template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    assert chat.turns(EOT, {EOT}) == [Turn("<user>2+2?\n<assistant>", False), Turn("4\n", True), Turn(EOT, True)]


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BAD_ROWS = [
    ({"text": "a"}, "messages must be a list and not empty; write prompt and response, or "),
    ({"prompt": "a", "response": " \n"}, "messages[1].content must be a text and not empty"),
    ({"messages": ["a"]}, "messages[0] must be an object with role and content"),
    ({"messages": [USER, {"content": "b"}]}, "messages[1] must be an object with role and content"),
    ({"messages": [{"role": ["user"], "content": "a"}, ANSWER]}, "messages[0].role=['user'] must be one of"),
    ({"messages": [USER, ANSWER, USER]}, "the last message must be of the assistant"),
    ({"messages": [USER, {"role": "system", "content": "c"}, ANSWER]}, "messages[1].role=system must be one of"),
]


def test_a_bad_row_is_named(tmp_path):
    path = tmp_path / "chat.jsonl"
    for row, message in BAD_ROWS:
        path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError) as raised:
            list(Files(path=str(path), format="chat").pieces("train"))
        text = str(raised.value)
        assert text.startswith(f"{path}, line 3: ") and message in text and "\n" not in text


def test_special_tokens_in_messages_are_refused():
    messages = [USER, {"role": "assistant", "content": "x<|im_end|>y"}]
    with pytest.raises(ValueError, match=r"line 1: messages\[1\].content contains the special token '<\|im_end\|>'"):
        encoded(messages, CHATML, MARKS)
    assert encoded(messages).flags.sum() == OPENS + len(" x<|im_end|>y") + 1  # no special token of this tokenizer


BAD_TEMPLATES = [
    ("{{ raise_exception('roles must alternate') }}", "refuses this conversation (roles must alternate)"),
    ("{{ cycler.__init__.__globals__.os.popen('true') }}", "refuses this conversation ("),
    ("{{ messages | length }}{{ messages[-1].content }}", "changes the text before this answer"),
]


@pytest.mark.parametrize(("template", "message"), BAD_TEMPLATES, ids=str)
def test_a_template_that_fails_is_named_with_the_row(template, message):
    with pytest.raises(ValueError) as raised:
        document([USER, ANSWER], template).turns(EOT, {EOT})
    assert str(raised.value).startswith("chat.jsonl, line 1: ") and message in str(raised.value)


def test_settings_that_are_refused(tmp_path):
    path, template, text = (tmp_path / name for name in ("chat.jsonl", "chat.jinja", "a.txt"))
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    template.write_text("{% for %}")
    text.write_text("a")
    for values, message in (
        ({"chat_template": str(template)}, "chat.jinja is not a Jinja template"),
        ({"chat_template": "nothing"}, "data.chat_template=nothing does not exist"),
        ({"path": str(text)}, "data.format=chat needs files of rows, such as .jsonl, and .*a.txt is text"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            Files(**{"path": str(path), "format": "chat", **values})
    with pytest.raises(ValueError, match="val_fraction=0.05 cannot be met with 1 whole conversations"):
        list(Files(path=str(path), format="chat").pieces("train"))
    template.write_text("{{ messages[0].content }}")
    rows = [json.dumps({"prompt": f"{i**9} is what?", "response": "b"}) for i in range(9)]
    path.write_text("\n".join(rows))
    files = {"path": str(path), "format": "chat", "chat_template": str(template), "val_fraction": 0.3}
    with pytest.raises(ValueError, match="has no answer to train on; choose another data.chat_template"):
        parse({"source": "files", "cache_dir": str(tmp_path / "cache"), **files}).prepare()


def test_the_split_is_by_conversation_and_copies_stay_together(tmp_path):
    """A long system prompt that all share makes no copies of them; the same messages do."""
    path, system = tmp_path / "chat.jsonl", {"role": "system", "content": "You are a helpful assistant. " * 40}
    rows = [
        {"messages": [system, USER, {"role": "assistant", "content": f"{i * 7919} and {i**5}"}]} for i in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:40]]))
    source = Files(path=str(path), format="chat", val_fraction=0.25)
    parts = [[piece.text for piece in source.pieces(split)] for split in ("train", "val")]
    assert len(parts[0]) + len(parts[1]) == 160 and 20 <= len(parts[1]) <= 60
    assert not set(parts[0]) & set(parts[1])
    assert source.split_rule == f"{len(parts[1])} of 160 documents that share no passages with others"
