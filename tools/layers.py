"""What import-linter cannot say about who uses what: `python tools/layers.py`, or `nox -s layers`.

* Pure modules import at module level only the standard library and one another.
* Only named modules of quack_core import torch at module level.
* No module uses a `_private` name of another.
* Nothing directly in a package bears the name of one of its public functions or classes:
  importing that module would replace the function.
* Modules are named by what is in them.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

PURE = {
    "quack_blockscaled.formats",
    "quack_blockscaled.record",
    "quack_blockscaled.sizes",
    "quack_core",
    "quack_core.__about__",
    "quack_core.arch",
    "quack_core.driver",
    "quack_core.dtypes",
    "quack_core.env",
    "quack_core.errors",
    "quack_core.gemm",
    "quack_core.gemm.activations",
    "quack_core.gemm.epilogue",
    "quack_core.gemm.op",
    "quack_core.layout",
    "quack_core.layout.algebra",
    "quack_core.layout.int_tuple",
    "quack_core.layout.layout",
    "quack_core.reduction",
    "quack_core.reduction.tiling",
    "quack_gemm.heuristic",
    "quack_norm.ops.topk.network",
}
PURE_NAMES = {"config", "rules", "spec"}  # of every operator
WITH_TORCH = {"quack_core.torch_op", "quack_core.torch_workspace", "quack_core.testing"}
VAGUE = {"common", "helpers", "misc", "util", "utils"}


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Args:
        name: dotted, of a package without `__init__`.
        path: where it lies.
        tree: its syntax.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_pure(self) -> bool:
        return self.name in PURE or self.name.rpartition(".")[2].removeprefix("bwd_") in PURE_NAMES

    @property
    def package(self) -> str:
        """What a relative import of one dot is relative to."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is what is loaded, `name` what is taken from it, if anything."""

    line: int
    module: str
    name: str
    bound: str
    at_top: bool


def read(sources: Path) -> Iterator[Module]:
    """The modules of the package whose parent folder is `sources`."""
    for path in sorted(sources.rglob("*.py")):
        parts = path.relative_to(sources).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Module(name, path, ast.parse(path.read_text(), str(path)))


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, those for type checkers aside."""
    pending: list[tuple[ast.AST, bool]] = [(module.tree, True)]
    while pending:
        node, at_top = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += [(child, at_top) for child in node.orelse]
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name
                yield Import(node.lineno, alias.name, "", bound, at_top)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(module, node)
            for alias in node.names:
                bound = alias.asname or alias.name
                yield Import(node.lineno, origin, alias.name, bound, at_top)
        inside = at_top and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The module that a `from` import names."""
    if not node.level:
        return node.module or ""
    parents = module.package.split(".")
    base = parents[: len(parents) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def check(modules: list[Module]) -> list[str]:
    """One line for each breach."""
    known = {module.name: module for module in modules}
    breaches = []
    for module in modules:
        found = list(imports(module))
        breaches += purity(module, found, known)
        breaches += torch_in_core(module, found)
        breaches += private_names(module, found, known)
        breaches += shadowed_names(module, known)
        if module.name.rpartition(".")[2] in VAGUE:
            breaches.append(f"{module.path}: a module is named by what is inside")
    return breaches


def purity(module: Module, found: list[Import], known: dict[str, Module]) -> Iterator[str]:
    if not module.is_pure:
        return
    for item in found:
        target = f"{item.module}.{item.name}"
        loaded = known.get(target) or known.get(item.module)
        outside = item.module.partition(".")[0] not in sys.stdlib_module_names
        if item.at_top and outside and not (loaded and loaded.is_pure):
            yield f"{module.path}:{item.line}: a pure module imports {item.module}"


def torch_in_core(module: Module, found: list[Import]) -> Iterator[str]:
    allowed = any(f"{module.name}.".startswith(f"{name}.") for name in WITH_TORCH)
    if allowed or not module.name.startswith("quack_core"):
        return
    for item in found:
        if item.at_top and item.module.partition(".")[0] == "torch":
            yield f"{module.path}:{item.line}: quack_core imports torch at module level here"


def private_names(module: Module, found: list[Import], known: dict[str, Module]) -> Iterator[str]:
    ours = {name.partition(".")[0] for name in known}
    bound = {}
    for item in found:
        if item.module.partition(".")[0] not in ours:
            continue
        for part in (*item.module.split("."), item.name):
            if is_private(part):
                yield f"{module.path}:{item.line}: {part} is private to another module"
        if not item.name or f"{item.module}.{item.name}" in known:
            bound[item.bound] = item
    for node in ast.walk(module.tree):
        of_module = isinstance(node, ast.Attribute) and ast.unparse(node.value) in bound
        if of_module and is_private(node.attr):
            yield f"{module.path}:{node.lineno}: {node.attr} is private to another module"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def shadowed_names(module: Module, known: dict[str, Module]) -> Iterator[str]:
    if module.path.name != "__init__.py":
        return
    for name in public_names(module):
        if f"{module.name}.{name}" in known:
            yield f"{module.path}: the module {module.name}.{name} bears a public name"


def public_names(module: Module) -> list[str]:
    """What `__all__` lists."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def main() -> int:
    modules = [each for src in sorted(ROOT.glob("packages/*/src")) for each in read(src)]
    breaches = check(modules)
    for line in breaches:
        print(line.replace(f"{ROOT}/", ""))
    print(f"{len(modules)} modules, {len(breaches)} breaches")
    return 1 if breaches or not modules else 0


if __name__ == "__main__":
    sys.exit(main())
