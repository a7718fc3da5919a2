"""README.md beside this file names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
INDEX = (Path(__file__).parent / "README.md").read_text()


def test_every_test_that_the_index_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", INDEX)
    assert len(named) == INDEX.count("::") > 20
    missing = []
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text())
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    assert missing == []
