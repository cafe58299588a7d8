"""The structure of the project: which module may import which, and which libraries wait until they are needed."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUND = ("errors", "console", "files", "hardware")
MODELS = ("loading", "checkpoint", "checkpoint_formats")  # modules of gpt/ that are rooms of their own
# A room is a folder or a module. It may import itself and the rooms of the rows below, but no other room of its row.
FLOORS = (
    ("train", "api"),
    ("generate", "commands"),
    ("training",),
    ("sampling", "loading"),
    ("interop",),
    ("checkpoint",),
    ("checkpoint_formats",),
    ("data", "model"),
    GROUND,
)
LIBRARIES = {  # where a library may be imported; everything not named here may be imported anywhere
    "lightning": ("gpt/training/",),
    "hydra": ("train.py", "gpt/training/cli.py"),
    "omegaconf": ("train.py", "gpt/training/cli.py"),
    "torch": ("gpt/model/", "gpt/sampling/", "gpt/interop/", "gpt/training/", "gpt/hardware/", "gpt/data/batches.py",
              "gpt/data/bpe_dropout.py", "gpt/export.py", "gpt/checkpoint.py", "gpt/loading.py", "generate.py"),
}  # fmt: skip
FILES = [ROOT / "train.py", ROOT / "generate.py", *sorted((ROOT / "gpt").rglob("*.py"))]


def relative(file: Path) -> str:
    """Return the path of a file from the root."""
    return file.relative_to(ROOT).as_posix()


def module_of(file: Path) -> str:
    """Return the name under which Python imports a file."""
    return relative(file).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def read_imports(file: Path) -> list[str]:
    """Return every module that a file imports, inside functions as well, but not for type checkers only."""
    modules = []
    tree = ast.parse(file.read_text(encoding="utf-8"))
    type_blocks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    for_types = {id(node) for block in type_blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(file)}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [name if name in MODULES else str(node.module) for name in names]
    return modules


MODULES = {module_of(file) for file in FILES}
PACKAGES = {module_of(file) for file in FILES if file.name == "__init__.py"}
GRAPH = {module_of(file): {name for name in read_imports(file) if name in MODULES} for file in FILES}


def room(module: str) -> str:
    """Return the room of a module: a folder, `commands`, a module of `GROUND` or `MODELS`, or a script."""
    parts = module.split(".")
    if parts[0] != "gpt":
        return parts[0]
    if len(parts) == 1:
        return "api"
    if len(parts) == 2 and parts[1] in (*GROUND, *MODELS, "api"):
        return parts[1]
    return parts[1] if (ROOT / "gpt" / parts[1]).is_dir() else "commands"


def floor(module: str) -> int:
    """Return the row of `FLOORS` that has the room of a module."""
    return next(i for i, rooms in enumerate(FLOORS) if room(module) in rooms)


def test_imports_point_down():
    """A module imports from its own room and from floors below."""
    for module, imported in GRAPH.items():
        for other in imported:
            same_room = room(other) == room(module) or {room(other), room(module)} <= set(GROUND)
            assert same_room or floor(other) > floor(module), f"{module} imports {other}"


def test_libraries_stay_in_their_rooms():
    """Lightning, Hydra, OmegaConf and torch are imported only where they belong."""
    for file in FILES:
        for name in read_imports(file):
            allowed = LIBRARIES.get(name.split(".")[0])
            assert allowed is None or relative(file).startswith(allowed), f"{relative(file)} imports {name}"


def test_no_circles():
    """No module imports itself through other modules, not even from inside a function."""
    finished: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in finished:
            for other in GRAPH[module]:
                follow(other, [*path, module])
            finished.add(module)

    for module in GRAPH:
        follow(module, [])


def test_every_module_is_used():
    """Another module imports each module of a folder of gpt/. Those beside the folders may be commands."""
    imported = set[str]().union(*GRAPH.values())
    in_folders = {module_of(file) for file in FILES if len(file.relative_to(ROOT).parts) > 2} - PACKAGES
    assert in_folders - imported == set()


def test_documented_arguments_exist():
    """What an `Args:` list names is a parameter of the function, or a field of the class."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                described = re.search(r"^Args:\n((?: .*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE)
                names = re.findall(r"^    \**(\w+):", described[1], re.MULTILINE) if described else []
                defined = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
                defined |= {ast.unparse(item.target) for item in ast.walk(node) if isinstance(item, ast.AnnAssign)}
                assert set(names) <= defined, f"{relative(file)}: {node.name}"


@pytest.mark.parametrize("folder", ["gpt", "tests", "benchmarks"])
def test_map(folder):
    """`python docs/map.py` prints a line about every file."""
    lines = [line.split(maxsplit=1) for line in runpy.run_path(str(ROOT / "docs/map.py"))["lines"](ROOT / folder)]
    assert [words for words in lines if words[0].endswith(".py") and len(words) < 2] == []
    assert {words[0] for words in lines} >= {file.name for file in (ROOT / folder).rglob("*.py")} - {"__init__.py"}


# Each process runs programs one after another. Beside each are the slow libraries that must not be loaded after it.
FRAMEWORKS = ["lightning", "hydra", "omegaconf", "tensorboard", "transformers", "tokenizers", "huggingface_hub"]
PROCESSES = {
    "without torch": [
        ("import gpt, gpt.errors", ["torch", "numpy", "gpt.data", "gpt.model", "gpt.training"]),
        ("mistake('generate', '--temp', '1')", ["torch", "numpy"]),
        ("mistake('generate', '--prompt', 'a', '--num-samples', '0')", ["torch", "numpy"]),
        ("mistake('gpt.tokens', '--text', 'a', '--file', 'b')", ["torch"]),
        ("mistake('gpt.compare', 'nowhere')", ["torch", "tensorboard"]),
        ("mistake('gpt.evaluate', '--text', 'nowhere')", ["torch"]),
        ("mistake('gpt.export', '--to', 'runs')", ["torch"]),
        (
            "import gpt.data.download, gpt.data.prepare, gpt.data.tokenizer as t; t.gpt2_tokenizer().encode('Hello')",
            ["torch", "lightning", "hydra", "requests"],
        ),
        ("import gpt.compare, gpt.evaluate, gpt.export, gpt.tokens", ["torch", "lightning", "hydra", "tensorboard"]),
    ],
    "training": [
        ("import gpt; gpt.train", ["lightning", "hydra", "matplotlib", "IPython"]),
        ("import gpt.training.start, gpt.training.resume", ["lightning", "hydra"]),
    ],
    "sampling": [
        ("import gpt.model.transformer", ["lightning", "omegaconf", "tiktoken", "numpy.f2py"]),
        (
            "import generate; generate.main(['--prompt', 'a', '--max-new-tokens', '1'])",
            [*FRAMEWORKS, "pyarrow", "pandas", "wandb", "mlflow", "train", "torch._dynamo"],
        ),
    ],
}
RUN_PROGRAMS = """
import runpy, sys
def mistake(module, *words):
    sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert end.code == 2, end.code
    else:
        raise AssertionError(words)
for program, libraries in PROGRAMS:
    exec(program)
    assert not sys.modules.keys() & set(libraries), (program, sys.modules.keys() & set(libraries))
"""


@pytest.mark.parametrize("name", PROCESSES)
def test_slow_libraries_wait(project, name):
    """A command that is mistyped answers before torch is imported. Sampling needs no library of the training."""
    code = RUN_PROGRAMS.replace("PROGRAMS", repr(PROCESSES[name]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
