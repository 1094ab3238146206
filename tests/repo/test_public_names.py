"""Public names come from the package root, and stay what they are whatever else is imported."""

# Imports every submodule, the pytest plugin aside, which pytest itself has to import first.
IMPORT_ALL = """
import importlib, pkgutil
def import_all(package):
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not each.name.endswith(".plugin"):
            importlib.import_module(each.name)
"""


def test_norm_exports_exactly_the_promised_names(fresh_python):
    found = fresh_python("import quack_norm\nresult = quack_norm.__all__, dir(quack_norm)")
    assert found[0] == ["QuackRMSNorm", "RMSNorm", "__version__", "rmsnorm"]
    assert set(found[0]) <= set(found[1])


def test_an_unknown_name_raises_attribute_error(fresh_python):
    code = """
import quack_norm
try:
    quack_norm.no_such_operator
except AttributeError as error:
    result = str(error)
"""
    assert fresh_python(code) == "module 'quack_norm' has no attribute 'no_such_operator'"


def test_public_names_survive_the_import_of_every_submodule(fresh_python):
    found = fresh_python(f"""
{IMPORT_ALL}
import quack_core, quack_norm
before = {{name: getattr(quack_norm, name) for name in quack_norm.__all__}}
import_all(quack_core)
import_all(quack_norm)
result = [name for name in quack_norm.__all__ if getattr(quack_norm, name) is not before[name]]
""")
    assert found == []


def test_public_names_work_after_the_import_of_every_submodule(fresh_python):
    found = fresh_python(f"""
{IMPORT_ALL}
import torch
import quack_norm
import_all(quack_norm)
x, weight = torch.randn(5, 24), torch.randn(24)
wanted = torch.nn.functional.rms_norm(x, (24,), weight, 1e-6)
plain = torch.nn.functional.rms_norm(x, (24,), None, 1e-6)
outcomes = [
    (quack_norm.rmsnorm(x, weight), wanted),
    (quack_norm.RMSNorm(24, eps=1e-6)(x), plain),
    (quack_norm.QuackRMSNorm(dim=24)(x), plain),
]
result = [float((got - want).abs().max() / want.abs().max()) for got, want in outcomes]
""")
    # Two roundings each side, of values at most the largest: four float32 epsilons.
    assert len(found) == 3
    assert max(found) <= 4 * 2.0**-23


def test_core_has_no_submodule_hidden_by_a_name(fresh_python):
    found = fresh_python(f"""
{IMPORT_ALL}
import types
import quack_core
import_all(quack_core)
names = [each.name for each in pkgutil.iter_modules(quack_core.__path__)]
hidden = [name for name in names if not isinstance(getattr(quack_core, name), types.ModuleType)]
result = len(names), hidden
""")
    assert found[0] > 8
    assert found[1] == []
