"""Absolute paths become their last component; everything else stays."""

import pytest

from tril.scripts.ablation.machine_paths import PathRemover, is_path

REMOVED = {
    "/home/jane/text.txt": "text.txt",
    "/root": "root",
    "/data/books/": "books",
    r"C:\Users\jane\text.txt": "text.txt",
    "d:/texts/a.txt": "a.txt",
    r"\\server\share\a.txt": "a.txt",
    "data.path=/home/jane/text.txt": "data.path=text.txt",
    "python train.py -m 'data.path=/srv/a.txt' seed=0,1": "python train.py -m 'data.path=a.txt' seed=0,1",
    "FileNotFoundError: '/tmp/w/model.n_heads=2,seed=0/last.ckpt' is gone": "FileNotFoundError: 'last.ckpt' is gone",
    "/runs/model.n_heads=2,seed=0": "model.n_heads=2,seed=0",
    "x=/a/b,/c/d": "x=b,d",
}
KEPT = (
    "val/loss",
    "../texts/a.txt",
    "./a/b",
    "~/texts/a.txt",
    "https://host.org/a/b",
    "</td></script>",
    "1/2",
    "a +/- b",
    "n_heads=4",
    "",
    "model.dim: 3 / 4",
)


@pytest.mark.parametrize("text", REMOVED)
def test_last_component_of_a_path_stays(text):
    assert PathRemover([])(text) == REMOVED[text]


@pytest.mark.parametrize("text", KEPT)
def test_other_text_stays(text):
    assert PathRemover([])(text) == text and not is_path(text)


def test_containers_are_copied_with_their_other_values():
    value = {"a": ["/x/y", 1, None], "b": {"c": 2.5, "d": ("/x/z", True)}, "/k/l": "v"}
    assert PathRemover([])(value) == {"a": ["y", 1, None], "b": {"c": 2.5, "d": ["z", True]}, "/k/l": "v"}
    assert value["a"][0] == "/x/y"


def test_known_paths_may_have_spaces():
    remove = PathRemover(
        [{"data": {"path": "/home/Jane Doe/my texts"}}, ["/home/Jane Doe/my texts/b c.txt", "no path"]]
    )
    assert remove("data.path='/home/Jane Doe/my texts/b c.txt' x") == "data.path='b c.txt' x"
    assert remove("in /home/Jane Doe/my texts") == "in my texts"
    assert PathRemover(["/"])("a / b") == "a / b"


def test_absolute_paths_of_every_system():
    assert [is_path(value) for value in ("/a", r"C:\a", "C:/a", r"\\server\share\a", "a/b", 3, None)] == [True] * 4 + [
        False
    ] * 3
