"""Imports go one way: models | kvstore <- mooncake_jax <- launch; roles meet in records and messages only."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"models", "kvstore", "mooncake_jax", "launch"}
ALLOWED_OURS = {
    "models": {"models"},
    "kvstore": {"kvstore"},
    "mooncake_jax": {"models", "kvstore", "mooncake_jax"},
    "launch": OURS,
}
ALLOWED_OTHERS = {
    "models/checkpoint": {
        "jax",
        "flax",
        "numpy",
        "ml_dtypes",
        "orbax",
        "safetensors",
        "gguf",
        "msgspec",
        "tqdm",
    },
    "models/tokenizer": {"numpy", "tokenizers", "jinja2", "msgspec"},
    "models": {"jax", "jaxlib", "flax", "numpy", "ml_dtypes"},
    "kvstore": {"numpy", "grpc", "msgspec", "prometheus_client"},
    "mooncake_jax/engine": {"jax", "jaxlib", "numpy", "ml_dtypes", "msgspec"},
    "mooncake_jax/engine/group": {"grpc", "numpy", "msgspec"},
    "mooncake_jax/frontend": {"aiohttp", "grpc", "msgspec", "numpy", "prometheus_client"},
    "mooncake_jax": {"grpc", "msgspec", "numpy"},
}
ROLES = ("conductor", "prefill", "decode", "frontend")


def modules() -> list[Path]:
    return [path for package in sorted(OURS) for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path):
    here = path.relative_to(ROOT).as_posix()
    layer = here.split("/")[0]
    for name in imported(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top in OURS:
            assert top in ALLOWED_OURS[layer], f"{here} imports {name}"
        elif layer != "launch":
            prefix = max((p for p in ALLOWED_OTHERS if here.startswith(p)), key=len)
            assert top in ALLOWED_OTHERS[prefix], f"{here} imports {name}"


@pytest.mark.parametrize("role", ROLES)
def test_roles_do_not_import_each_other(role):
    others = tuple(f"mooncake_jax.{other}" for other in ROLES if other != role)
    for path in (ROOT / "mooncake_jax" / role).rglob("*.py"):
        bad = [name for name in imported(path) if name.startswith(others)]
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"
