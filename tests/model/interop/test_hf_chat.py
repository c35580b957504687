"""The chat template of a folder, in each of its published forms."""

import pytest
from jinja2 import Environment

from tests.model.interop.folders import change_json
from tril.model.interop.hf_chat import chat_template

TOKENS = "{{ bos_token }}{{ messages }}{{ eos_token }}"


@pytest.mark.parametrize(
    "values",
    [
        {"chat_template": TOKENS},
        {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": TOKENS}]},
    ],
    ids=["text", "several"],
)
def test_template_with_its_special_tokens(tmp_path, values):
    special = {"bos_token": '<"é', "eos_token": {"content": "<e>"}, "unk_token": None}
    change_json(tmp_path / "tokenizer_config.json", **special, **values)
    template = chat_template(tmp_path)
    assert template is not None and Environment().from_string(template).render(messages="-") == '<"é-<e>'


def test_a_file_of_its_own_goes_first(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat_template(tmp_path) == "from the file"
    change_json(tmp_path / "tokenizer_config.json", chat_template="from the settings", eos_token="<e>")
    assert chat_template(tmp_path) == '{% set eos_token = "<e>" %}from the file'


@pytest.mark.parametrize("values", [None, {}, {"chat_template": None}, {"chat_template": []}], ids=str)
def test_none(tmp_path, values):
    if values is not None:
        change_json(tmp_path / "tokenizer_config.json", eos_token="<e>", **values)
    assert chat_template(tmp_path) is None


def test_damage_is_one_line(tmp_path):
    change_json(tmp_path / "tokenizer_config.json", chat_template=7)
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be text, not int"):
        chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8"):
        chat_template(tmp_path)
