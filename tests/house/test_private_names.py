"""The private names of other projects that this one uses: each is listed here, and is still there.

They are why Hydra has an upper bound in pyproject.toml, and why a newer PyTorch warns.
"""

import argparse
import ast
import re
import tomllib
from collections.abc import Callable
from typing import Any

import hydra._internal.utils
import pytest
import torch
from torch import distributed

from harness import ROOT

# Each name as our code takes it; what for; and how it is looked up.
PRIVATE: dict[str, tuple[str, Callable[[], Any]]] = {
    "torch._C": ("the library of OpenMP that PyTorch has loaded", lambda: torch._C.__file__),
    "torch._foreach_lerp": ("Muon's momentum, all matrices at once", lambda: torch._foreach_lerp),
    "torch._foreach_lerp_": ("Muon's averages, all matrices at once", lambda: torch._foreach_lerp_),
    "torch._foreach_mul_": ("the decay of all matrices at once", lambda: torch._foreach_mul_),
    "torch._foreach_add_": ("the update of all matrices at once", lambda: torch._foreach_add_),
    "torch._weight_int8pack_mm": ("sampling in int8", lambda: torch._weight_int8pack_mm),
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": (
        "sampling in bf16",
        lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    ),
    "torch.ops.mkldnn._reorder_linear_weight": (
        "weights in oneDNN's own order, for sampling",
        lambda: torch.ops.mkldnn._reorder_linear_weight,
    ),
    "torch.ops.mkldnn._linear_pointwise": ("products with them", lambda: torch.ops.mkldnn._linear_pointwise),
    "distributed.distributed_c10d._set_pg_timeout": (
        "how long a rank is waited for, before torch 2.15",
        lambda: getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout,
    ),
    "hydra._internal.utils": ("which words are options", lambda: hydra._internal.utils.get_args_parser),
    "argparse.HelpFormatter._get_help_string": (
        "Hydra on Python 3.14",
        lambda: argparse.HelpFormatter._get_help_string,
    ),
}


def foreign_names() -> dict[str, str]:
    """The private names that gpt/ takes of what it has not defined itself, each with a place where it does."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "gpt").rglob("*.py"))}
    own, used = set(), {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
                else:
                    used[node.attr] = f"{file.relative_to(ROOT)}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and re.search(r"\._", str(node.module)):
                used[str(node.module).rpartition(".")[2]] = f"{file.relative_to(ROOT)}:{node.lineno}"
    return {name: place for name, place in used.items() if name not in own}


@pytest.mark.parametrize("name", PRIVATE)
def test_it_is_there(name):
    """What fails here has changed in the version that is installed, and the code that uses it needs another way."""
    purpose, look_up = PRIVATE[name]
    try:
        look_up()
    except AttributeError as error:
        pytest.fail(f"{name}, which gives us {purpose}, is gone from the version that is installed ({error})")


def test_all_are_listed():
    """A private name that comes into gpt/ is named here."""
    listed = {name.rpartition(".")[2] for name in PRIVATE}
    assert {name: place for name, place in foreign_names().items() if name not in listed} == {}


def test_bounds():
    """Lightning is held below its next major version, and Hydra, whose private names are used, below its next minor.

    No other dependency has an upper bound: PyTorch warns of a new version instead.
    """
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)[^;<\n]*<([\d.]+)", "\n".join(dependencies), re.M))
    assert bounds == {"lightning": "3", "hydra-core": "1.4"}
