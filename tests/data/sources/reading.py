"""What the tests of the sources share."""


def text_of(source, split):
    return "".join(piece.text for piece in source.pieces(split))


def documents(source, split):
    texts = [""]
    for piece in source.pieces(split):
        texts[-1] += piece.text
        if piece.ends_document:
            texts.append("")
    assert texts.pop() == ""
    return texts
