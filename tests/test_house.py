"""The layout of the house: data flows one way, and imports point the same way."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import co2
from co2.method import METHODS, load_methods

PACKAGE = Path(co2.__file__).parent

# A room may import from itself and from the rooms before it.
ORDER = [
    "errors",
    "files",
    "lazily",
    "schema",
    "philox",
    "machine",
    "data",
    "kernels",
    "views",
    "networks",
    "objective",
    "measures",
    "runs",
    "method",
    "experiment",
    "methods",
    "recipes",
    "checkpoint",
    "engine",
    "evaluation",
    "export",
    "report",
    "study",
    "bench",
    "demo",
    "cli",
    "__main__",
]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("co2"):
            names = [f"co2.{alias.name}" for alias in node.names] if node.module == "co2" else [node.module]
            yield from names
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("co2"))


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_reaches_into_a_later_one(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in ORDER, f"{own} has no place in the house: add it to ORDER and to the README's tree"
    for module in imported_modules(path):
        if room(module) and room(module) != "__version__":
            assert ORDER.index(room(module)) <= ORDER.index(own), f"{path.name} imports {module}"


@pytest.mark.parametrize(
    "path", [*sorted(PACKAGE.rglob("specification.py")), PACKAGE / "views/view.py"], ids=lambda path: path.parent.name
)
def test_settings_import_nothing_heavy(path):
    assert set(imported_modules(path)) <= {"co2.errors", "co2.schema", "co2.evaluation.specification"}
    assert "torch" not in {name.split(".")[0] for name in _all_imports(path)}


def _all_imports(path):
    """What is imported with a module. What stands under TYPE_CHECKING is not: nobody but type checkers reads it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# Strings that are spelt like a metric of a method and mean something else, or cannot be had from its declaration.
METRICS_OF_METHODS_ALLOWED = {
    "evaluation/knn.py": {"top1", "top5"},  # accuracies of a protocol, in its own record
    "evaluation/labels.py": {"top1", "top5"},
    "evaluation/suite.py": {"top1"},
    "study/tables.py": {"top1"},
    "bench/loss.py": {"instance", "consistency"},  # parts of the objective, whose gradients are compared
    "bench/train.py": {"spread"},  # of repeated measurements
    "experiment.py": {"cosine"},  # a schedule of the learning rate
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_metrics_are_named_where_a_method_declares_them_and_nowhere_else(path):
    own = path.relative_to(PACKAGE).as_posix()
    if own.startswith(("methods/", "objective/", "kernels/")):
        return
    load_methods()
    ours = [one for one in METHODS.values() if one.__module__.startswith("co2.methods.")]
    declared = [metric for one in ours for metric in one.metrics]
    names = {metric.name for metric in declared}
    symbols = {metric.symbol for metric in declared if "_" in metric.symbol}  # no word of any language
    assert {"instance", "top1"} <= names
    assert "L_con" in symbols
    tree = ast.parse(path.read_text())
    words = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    documents = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said = {ast.get_docstring(one, clean=False) for one in ast.walk(tree) if isinstance(one, documents)}
    found = {word for word in words if word in names or (word not in said and any(one in word for one in symbols))}
    assert found == METRICS_OF_METHODS_ALLOWED.get(own, set())


def test_help_and_recipes_do_not_import_torch():
    code = (
        "import sys\nfrom co2.cli import main\n"
        "main(['--help']); main(['recipes']); main(['pretrain', '--help'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_public_name_can_be_imported():
    for name in co2.__all__:
        assert getattr(co2, name) is not None
    assert callable(co2.pretrain)
    with pytest.raises(AttributeError):
        co2.nothing_of_that_name  # noqa: B018


def test_completion_shows_the_public_names_and_no_others():
    assert sorted(dir(co2)) == sorted([*co2.__all__, "__version__"])


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "co2", "--version"], check=True, capture_output=True, text=True)
    assert co2.__version__ in done.stdout


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path):
    # A folder called `co2` in the current folder would be taken for the package, if that lay at its top.
    (tmp_path / "co2").symlink_to(PACKAGE.parents[1])
    code = "import co2; assert co2.__file__ and callable(co2.pretrain)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_oldest_releases_that_are_tested_are_the_oldest_that_are_admitted():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    lowest = dict(one.split(">=") for one in stated if ">=" in one)
    tested = dict(re.findall(r"^([\w-]+)==(.+)$", (root / "constraints-lowest.txt").read_text(), flags=re.MULTILINE))
    assert lowest.keys() == tested.keys()
    for name, version in lowest.items():
        assert re.fullmatch(rf"{re.escape(version)}(\.0)*", tested[name]), name
