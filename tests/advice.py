"""The messages in the sources of hago that advise: every text that an error or a warning is made of, and says what to
do.

A message is the constant parts of the text that a call of an error's class, of `warn`, or of a function that makes such
texts is given; `{}` stands for what is put in. Advice is a clause that begins with a verb in the imperative.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from calls import sources

VERBS = """
    add allow apply ask build call change check chmod choose continue convert correct define drop export finetune fold
    give import install keep lay leave let list load look lower make mend move name open pass pip put quantize raise
    read record remove rename replace request resume retrain run save search see set shorten shrink simulate split start
    state take train try turn unset update use wait write
"""
ADVICE = re.compile(
    rf"(?:^|[;:,.(] |\bor |\band |\bthen |, so |\bto )(?P<verb>{'|'.join(VERBS.split())})\b(?! (?:is|are|has|of)\b)",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Message:
    """A message.

    Args:
        module: where it stands.
        text: its constant parts, `{}` between them.
    """

    module: str
    line: int
    text: str


def text_of(node: ast.AST) -> str:
    """The constant parts of a text that is put together."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}|{text_of(node.orelse)}"
    return "{}"


#: Modules whose texts are help, and no messages.
HELP = ("hago.cli.arguments", "hago.cli.arguments", "hago.cli.arguments")


def messages(texts: Mapping[str, str] | None = None) -> Iterator[Message]:
    """Every text of at least four words in hago that advises, but docstrings and help of the command line."""
    for module, source in (sources() if texts is None else texts).items():
        if module in HELP:
            continue
        tree = ast.parse(source)
        inner = {id(n) for node in ast.walk(tree) for n in _parts(node)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)) and id(node) not in inner:
                text = text_of(node)
                if len(text.split()) > 3 and ADVICE.search(text):
                    yield Message(module, node.lineno, text)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What belongs to a larger text, docstrings, and help of options."""
    if isinstance(node, (ast.JoinedStr, ast.BinOp, ast.IfExp)):
        yield from (n for n in ast.walk(node) if n is not node)
    elif isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg == "help"):
        yield node.value


if __name__ == "__main__":
    for message in messages():
        print(f"{message.module}:{message.line}: {message.text}")
