"""All that users are told when something is wrong stands in one table, refusals.txt: for reading it in one go."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("refusals.txt")
ERRORS = {"UserError", "ExternalError", "NonFiniteError", "kind"}


def template(node: ast.expr) -> str:
    """The text of an expression that makes a string, with the expressions in it as they are written."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.FormattedValue(value=value):
            return template(value) if isinstance(value, ast.Constant) else f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return f"{{{ast.unparse(node)}}}"


def refusals() -> list[str]:
    """One line for each error that is made: the file, and its message."""
    lines = []
    for file in sorted([*ROOT.glob("gpt/**/*.py"), *ROOT.glob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                text = template(node.args[0])
                if not re.fullmatch(r"\{[^{}]*\}", text):  # made elsewhere
                    lines.append(f"{file.relative_to(ROOT).as_posix()}: {text!r}")
    return sorted(lines)


def test_the_table_is_up_to_date():
    """If it is not, it is now: read the difference, as a user would, and commit it."""
    now, before = refusals(), TABLE.read_text(encoding="utf-8").splitlines()
    if now != before:
        TABLE.write_text("\n".join([*now, ""]), encoding="utf-8")
    assert now == before
