"""A class of values is frozen, unless the package assigns one of its fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tokshard"


def assigned(tree: ast.AST, *, by_self: bool) -> set[str]:
    """The attributes that a module assigns, of ``self`` or of anything else."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in found if (ast.unparse(node.value) == "self") == by_self}


def of_values(tree: ast.AST) -> Iterator[tuple[ast.ClassDef, bool]]:
    """The dataclasses and structs of a module, and whether they are frozen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            said = [*map(ast.unparse, [*node.decorator_list, *node.bases, *node.keywords])]
            if any(each.startswith("dataclass") or each == "msgspec.Struct" for each in said):
                yield node, "frozen=True" in " ".join(said)


def test_what_is_not_frozen_is_changed() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
    }
    elsewhere = {name for tree in trees.values() for name in assigned(tree, by_self=False)}
    found = []
    for path, tree in trees.items():
        for node, is_frozen in of_values(tree):
            fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
            if not is_frozen and not fields & (elsewhere | assigned(node, by_self=True)):
                found.append(f"{path}: {node.name}")
    assert found == []
