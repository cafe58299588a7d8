"""The private names of other projects that gpt/ uses. The table lists each of them, and each still exists.

Because of them, Hydra has an upper bound in pyproject.toml, and a newer PyTorch gives a warning.
"""

import argparse
import ast
import os
import re
import tomllib
from collections.abc import Callable
from typing import Any

import hydra._internal.utils
import pytest
import torch
from torch import distributed

from harness import ROOT

# Each name as in our code, its purpose, and a function that looks it up.
PRIVATE: dict[str, tuple[str, Callable[[], Any]]] = {
    "torch._dynamo": (
        "how many graphs a function may have, and graphs without cuts for DDP",
        lambda: (torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp),
    ),
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
    "os._exit": ("process 1 of a container, which its own signal does not end", lambda: os._exit),
}


def foreign_names() -> dict[str, str]:
    """Return the private names in gpt/ that it does not define, each with a place of its use."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "gpt").rglob("*.py"))}
    defined, used = set(), {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    defined.add(node.attr)
                else:
                    used[node.attr] = f"{file.relative_to(ROOT)}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and re.search(r"\._", str(node.module)):
                used[str(node.module).rpartition(".")[2]] = f"{file.relative_to(ROOT)}:{node.lineno}"
    return {name: place for name, place in used.items() if name not in defined}


@pytest.mark.parametrize("name", PRIVATE)
def test_it_is_there(name):
    """If it fails, the installed version has changed, and our code needs another way."""
    purpose, look_up = PRIVATE[name]
    try:
        look_up()
    except AttributeError as error:
        pytest.fail(f"{name}, for {purpose}, is not in the installed version ({error})")


def test_all_are_listed():
    """A new private name in gpt/ needs a row in the table."""
    listed = {name.rpartition(".")[2] for name in PRIVATE}
    assert {name: place for name, place in foreign_names().items() if name not in listed} == {}


def test_bounds():
    """Lightning stays below its next major version, and Hydra, for its private names, below its next minor.

    No other dependency has an upper bound. A new version of PyTorch gives a warning.
    """
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)[^;<\n]*<([\d.]+)", "\n".join(dependencies), re.M))
    assert bounds == {"lightning": "3", "hydra-core": "1.4"}
