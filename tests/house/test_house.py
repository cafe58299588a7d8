"""The structure of the project: which module may import which, and how much there is to read."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUND = ("errors", "console", "files", "hardware")
# Each room may import itself and the rooms of the rows below it; rooms in one row do not know each other.
MODELS = ("loading", "checkpoint", "checkpoint_formats")  # modules of gpt/ that are rooms of their own
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


def place(file: Path) -> str:
    """A file as its path from the root."""
    return file.relative_to(ROOT).as_posix()


def module_of(file: Path) -> str:
    """A file as the module that Python imports."""
    return place(file).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports(file: Path) -> list[str]:
    """Every module that a file imports, inside functions as well."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in MODULES else str(node.module) for name in names]
    return found


MODULES = {module_of(file) for file in FILES}
GRAPH = {module_of(file): {name for name in imports(file) if name in MODULES} for file in FILES}


def room(module: str) -> str:
    """The room of a module: its wing, `commands`, one of the ground's modules, or a script."""
    parts = module.split(".")
    if parts[0] != "gpt":
        return parts[0]
    if len(parts) == 1 or (len(parts) == 2 and parts[1] in (*GROUND, *MODELS, "api")):
        return "api" if len(parts) == 1 else parts[1]
    return parts[1] if (ROOT / "gpt" / parts[1]).is_dir() else "commands"


def floor(module: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room(module) in rooms)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module):
    """A module imports from its own room and from floors below."""
    for other in GRAPH[module]:
        same_room = room(other) == room(module) or {room(other), room(module)} <= set(GROUND)
        assert same_room or floor(other) > floor(module), f"{module} imports {other}"


@pytest.mark.parametrize("file", FILES, ids=place)
def test_libraries_stay_in_their_rooms(file):
    """Lightning, Hydra, OmegaConf and torch are imported only where they belong."""
    for name in imports(file):
        allowed = LIBRARIES.get(name.split(".")[0])
        assert allowed is None or place(file).startswith(allowed), f"{place(file)} imports {name}"


def test_no_circles():
    """No module imports itself by way of others, not even from inside a function."""
    finished: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in finished:
            for other in GRAPH[module]:
                follow(other, [*path, module])
            finished.add(module)

    for module in GRAPH:
        follow(module, [])


@pytest.mark.parametrize(("file", "most"), [("README.md", 220), ("train.py", 70)])
def test_front_door_is_short(file, most):
    """What a newcomer reads first."""
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) <= most


def test_core_is_there():
    """The README lists the files that say all that is to be understood, in the order to read them."""
    core = re.findall(r"^\d\. \[(\S+)\]\(\1\)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(core) == 8
    assert {ROOT / name for name in core} <= set(FILES)


@pytest.mark.parametrize("folder", ["gpt", "tests", "benchmarks"])
def test_map(folder):
    """`python docs/map.py` has a line about every file."""
    lines = [line.split(maxsplit=1) for line in runpy.run_path(str(ROOT / "docs/map.py"))["lines"](ROOT / folder)]
    assert [words for words in lines if words[0].endswith(".py") and len(words) < 2] == []
    assert {words[0] for words in lines} >= {file.name for file in (ROOT / folder).rglob("*.py")} - {"__init__.py"}


def test_wheel_holds_every_module():
    """setuptools finds all wings, each with its docstring, and the rank table."""
    from setuptools import find_packages

    found = set(find_packages(str(ROOT), include=["gpt", "gpt.*"]))
    assert found == {module_of(file.parent / "__init__.py") for file in (ROOT / "gpt").rglob("*.py")}
    assert (ROOT / "gpt/assets/r50k_base.tiktoken").is_file()
    for package in found:
        source = (ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)), package


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("gpt.data.prepare, gpt.data.download", ["torch", "lightning", "hydra"]),
        ("gpt.compare, gpt.evaluate, gpt.export, gpt.tokens", ["torch", "lightning", "hydra", "tensorboard"]),
        ("gpt.training.start, gpt.training.resume", ["lightning", "hydra"]),
        ("gpt.model.transformer", ["lightning", "omegaconf", "tiktoken", "numpy.f2py"]),
    ],
)
def test_slow_libraries_wait(modules, absent):
    """Importing a wing does not import what only another one needs."""
    code = f"import sys, {modules}\nprint([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
