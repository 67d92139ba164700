import pickle
import subprocess
import sys

import pytest

import twinkle_mesh

ERRORS = [
    (twinkle_mesh.InvalidMeshError, ValueError),
    (twinkle_mesh.RankOutsideMeshError, ValueError),
    (twinkle_mesh.LauncherError, ValueError),
    (twinkle_mesh.PlacementError, RuntimeError),
]


def test_all_is_sorted_complete_and_documented() -> None:
    names = twinkle_mesh.__all__
    assert names == sorted(names)
    public = {name for name, value in vars(twinkle_mesh).items() if not name.startswith("_") and not hasattr(value, "__path__")}
    assert set(names) == {name for name in public if getattr(vars(twinkle_mesh)[name], "__module__", "").startswith("twinkle_mesh")}
    for name in names:
        assert (vars(twinkle_mesh)[name].__doc__ or "").strip(), name


@pytest.mark.parametrize(("kind", "stdlib"), ERRORS)
def test_errors_are_the_stdlib_type_they_are_and_pickle(kind: type[twinkle_mesh.MeshError], stdlib: type[Exception]) -> None:
    assert issubclass(kind, twinkle_mesh.MeshError)
    assert issubclass(kind, stdlib)
    error = pickle.loads(pickle.dumps(kind("what and why")))
    assert type(error) is kind
    assert str(error) == "what and why"


def test_importing_and_using_it_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from twinkle_mesh import *; m = DeviceMesh.from_sizes(dp_size=2); m.rank_groups('dp'); m.draw(); "
        "plan_placement([DeviceGroup('a', 2, 'cpu')], [Node('n', 0, 2)]); "
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_without_torch_the_conversion_names_the_install_line() -> None:
    program = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from twinkle_mesh import DeviceMesh
try:
    DeviceMesh.from_sizes().to_torch_device_mesh()
except ImportError as error:
    print(error.name, error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("torch ")
    assert "pip install torch" in result.stdout
