"""Each package alone: its wheel in a new environment outside the workspace, with nothing but what it declares."""

from __future__ import annotations

import email
import re
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from isolated import Environment
from packaging.requirements import Requirement
from packaging.version import Version
from workspace import Distribution, read_distributions

# Downloads, on a machine whose cache is empty.
pytestmark = pytest.mark.timeout(900)

# What a package's declared dependencies must not bring in.
NOT_INSTALLED = {
    "twinkle-mesh": ("torch", "ray", "transformers"),
    "twinkle-remote": ("torch", "ray", "transformers"),
    "twinkle-data": ("torch", "ray", "transformers", "datasets"),
    "twinkle-train": ("ray", "transformers", "megatron", "vllm"),
    "twinkle-sync": ("ray", "transformers", "megatron", "vllm"),
    "twinkle-megatron": ("ray", "vllm"),
    "twinkle-transformers": ("ray", "vllm", "megatron"),
    "twinkle-vllm": ("ray", "vllm", "megatron"),
    "twinkle-client": ("torch", "ray", "transformers", "peft", "numpy", "pandas", "fastapi"),
    "twinkle-server": ("ray", "transformers", "megatron", "vllm"),
    "twinkle-rl": ("ray", "transformers", "megatron", "vllm", "matplotlib"),
}

# Code that needs an extra which is not there: the error names the line that installs it.
WITHOUT_EXTRA = {
    "twinkle-remote": [("import twinkle_remote as r; r.initialize('ray', groups=[])", "pip install 'twinkle-remote[ray]'")],
    "twinkle-rl": [
        ("from twinkle.model import MegatronModel", "pip install 'twinkle-rl[megatron]'"),
        ("from twinkle.model import TransformersModel", "pip install 'twinkle-rl[transformers]'"),
        ("from twinkle.sampler import vLLMSampler", "pip install 'twinkle-rl[vllm]'"),
    ],
}

# As the documentation has it. httpx and pydantic are loaded when a client is made.
IMPORT_OF_THE_CLIENT = "from twinkle_client.manager import TwinkleClient"

# All of its python blocks are programs, which run in this order in one folder.
WHOLE_READMES = {"twinkle-sync", "twinkle-vllm"}

# Extras that a README may offer and that this machine cannot take.
NEEDS_A_GPU = {"cuda", "te", "flash"}


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_its_metadata(distribution: Distribution, wheels: dict[str, Path]) -> None:
    metadata = _metadata(wheels[distribution.name])
    assert metadata["Name"] == distribution.name
    assert metadata["Version"] == distribution.version
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "The Twinkle developers"
    assert metadata["Summary"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    # A long description, so a page on an index is not empty.
    assert "pip install" in str(metadata.get_payload())


def test_the_wheel_holds_one_typed_module_and_no_tests(distribution: Distribution, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[distribution.name]) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {distribution.module}
    assert f"{distribution.module}/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "/tests/" in name or name.endswith((".pyc", "conftest.py"))]


def test_siblings_are_pinned_by_ranges_that_end_before_the_next_minor_release(distribution: Distribution, wheels: dict[str, Path]) -> None:
    siblings = read_distributions()
    for line in _metadata(wheels[distribution.name]).get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.name not in siblings or requirement.name == distribution.name:
            continue
        version = Version(siblings[requirement.name].version)
        assert requirement.specifier.contains(version), f"{line} does not take the workspace's {version}"
        assert not requirement.specifier.contains(Version(f"{version.major}.{version.minor + 1}.0")), f"{line} has no upper end"
        assert requirement.url is None, f"{line} names a place"


def test_it_imports_with_only_its_declared_dependencies(distribution: Distribution, environment: Environment) -> None:
    environment.check()
    printed = environment.execute(
        f"""
import importlib.metadata, importlib.util, pathlib, sys
import {distribution.module} as module
assert "packages" not in pathlib.Path(module.__file__).parts, module.__file__
assert importlib.metadata.version({distribution.name!r}) == {distribution.version!r}
assert module.__all__ and len(set(module.__all__)) == len(module.__all__)
print([name for name in {NOT_INSTALLED[distribution.name]!r} if name in sys.modules or importlib.util.find_spec(name)])
"""
    )
    assert printed.strip() == "[]", "brought in though no dependency declares it"


def test_the_client_installs_little_and_imports_fast(distribution: Distribution, environment: Environment) -> None:
    if distribution.name != "twinkle-client":
        pytest.skip("of the client only: it is installed on laptops")
    code = f"""
import importlib.metadata, os, pathlib, subprocess, sys, sysconfig
installed = [found for found in importlib.metadata.distributions() if found.name.lower() not in ("pip", "setuptools", "wheel")]
site = pathlib.Path(sysconfig.get_path("purelib"))
size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
timed = "import time; t = time.process_time(); {IMPORT_OF_THE_CLIENT}; print(time.process_time() - t)"
seconds = min(float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout) for _ in range(3))
print(len(installed), size / 2**20, seconds)
"""
    packages, mebibytes, seconds = map(float, environment.execute(code).split())
    assert 3 <= packages <= 20
    assert mebibytes <= 40
    assert seconds <= 0.35


def test_a_missing_extra_is_named_with_its_install_line(distribution: Distribution, environment: Environment) -> None:
    for code, install_line in WITHOUT_EXTRA.get(distribution.name, []):
        message = environment.execute(f"try:\n    {code}\nexcept ImportError as error:\n    print(error)\n")
        assert install_line in message, f"{code}: {message}"


def test_its_commands_answer_without_extras(distribution: Distribution, environment: Environment) -> None:
    for command in distribution.project.get("scripts", {}):
        printed = environment.execute(f"import subprocess, sys; sys.exit(subprocess.run(['venv/bin/{command}', '--help']).returncode)")
        assert command in printed


def readme_example(readme: str, name: str) -> tuple[set[str], str]:
    """The first python block, and the extras that the install lines before it name."""
    before, found, rest = readme.partition("```python\n")
    assert found, "README.md has no ```python block"
    assert re.search(rf"pip install '?{name}\b", before), f"README.md has no `pip install {name}` before its example"
    extras = {extra.strip() for group in re.findall(rf"{name}\[([^]]*)\]", before) for extra in group.split(",")}
    return extras - NEEDS_A_GPU, rest.partition("\n```")[0] + "\n"


def other_examples(readme: str) -> list[tuple[set[str], str]]:
    """The later python blocks, each with what is installed up to there: packages of ours with extras."""
    parts = re.split(r"```python\n(.*?\n)```", readme, flags=re.DOTALL)
    found: list[tuple[set[str], str]] = []
    for index in range(3, len(parts), 2):
        named = re.findall(r"\b(twinkle-[a-z]+)\[([^]]*)\]", "".join(parts[: index + 1]))
        wanted = {(package, extra.strip()) for package, group in named for extra in group.split(",")}
        found.append(({f"{package}[{extra}]" for package, extra in wanted if extra not in NEEDS_A_GPU}, parts[index]))
    return found


def test_readme_examples_take_the_extras_named_before_them() -> None:
    block = "```python\nprint(1)\n```\n"
    install = "pip install 'twinkle-x[a, b]'\npip install 'twinkle-x[cuda]'\n"
    assert readme_example(f"{install}{block}pip install 'twinkle-x[c]'\n```python\nprint(2)\n```", "twinkle-x") == ({"a", "b"}, "print(1)\n")
    more = f"{install}{block}```python\n# pip install 'twinkle-y[c]'\nprint(2)\n```\n"
    assert other_examples(more) == [({"twinkle-x[a]", "twinkle-x[b]", "twinkle-y[c]"}, "# pip install 'twinkle-y[c]'\nprint(2)\n")]
    with pytest.raises(AssertionError, match="no ```python block"):
        readme_example(install, "twinkle-x")
    with pytest.raises(AssertionError, match="no `pip install twinkle-y`"):
        readme_example(install + block, "twinkle-y")


def test_its_readme_example_runs_with_the_extras_that_it_names(distribution: Distribution, environment: Environment) -> None:
    extras, code = readme_example((distribution.folder / "README.md").read_text(), distribution.name)
    if extras:
        environment.install(f"{distribution.name}[{','.join(sorted(extras))}]=={distribution.version}")
    # A file of its own that can be imported again: the example may start processes.
    environment.execute(code, timeout_s=300)


@pytest.mark.full
def test_all_examples_of_its_readme_run_one_after_another(distribution: Distribution, environment: Environment) -> None:
    if distribution.name not in WHOLE_READMES:
        pytest.skip("some of its examples are parts of programs")
    readme = (distribution.folder / "README.md").read_text()
    for requirements, code in other_examples(readme):
        environment.install(*sorted(requirements))
        environment.execute(code, timeout_s=400)
