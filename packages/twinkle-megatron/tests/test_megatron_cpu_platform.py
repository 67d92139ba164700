"""The CPU platform: what it refuses, and that every rule still fits the installed megatron-core."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from twinkle_megatron import RuleError
from twinkle_megatron.cpu import GENERAL_RULES, SPECIAL_RULES, SUPPORTED_VERSION, GeneralRule, SpecialRule, rewrite


def megatron_folder() -> Path:
    # Without importing it: megatron.core must not be imported before the platform is on.
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def source_of(module: str) -> str:
    return (megatron_folder().parent / (module.replace(".", "/") + ".py")).read_text()


@pytest.mark.parametrize("rule", SPECIAL_RULES, ids=lambda rule: rule.name)
def test_a_special_rule_matches_exactly_once(rule: SpecialRule) -> None:
    assert importlib.metadata.version("megatron-core") == SUPPORTED_VERSION
    source = source_of(rule.module)
    assert source.count(rule.old) == 1
    compile(rewrite(rule.module, source), rule.module, "exec")


@pytest.fixture(scope="module")
def all_sources() -> str:
    return "\n".join(path.read_text() for path in sorted((megatron_folder() / "core").rglob("*.py")))


@pytest.mark.parametrize("rule", GENERAL_RULES, ids=lambda rule: rule.name)
def test_a_general_rule_is_still_needed(rule: GeneralRule, all_sources: str) -> None:
    assert rule.pattern.search(all_sources)


def test_rule_names_are_unique() -> None:
    names = [rule.name for rule in (*GENERAL_RULES, *SPECIAL_RULES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("times", [0, 2])
def test_a_special_rule_that_does_not_match_once_names_itself_the_module_and_the_version(times: int) -> None:
    rule = SPECIAL_RULES[0]
    with pytest.raises(RuleError, match=rf"'{rule.name}'.*matches {times} times in {rule.module}.*megatron-core {SUPPORTED_VERSION}"):
        rewrite(rule.module, rule.old * times)


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("x = torch.cuda.current_device()", "x = _twinkle_cuda.current_device()"),
        ("from torch.cuda.memory import MemPool", "from torch.cuda.memory import MemPool"),
        ("@torch.cuda.amp.custom_fwd", "@torch.cuda.amp.custom_fwd"),
        ("p.type() == 'torch.cuda.FloatTensor'", "p.type() == 'torch.FloatTensor'"),
        ("torch.zeros(1, device='cuda')", 'torch.zeros(1, device="cpu")'),
        ("model.cuda(torch.cuda.current_device())", "model"),
        ("empty(n, pin_memory=True)", "empty(n, pin_memory=False)"),
    ],
)
def test_general_rules_rewrite_what_they_should(source: str, rewritten: str) -> None:
    assert rewrite("megatron.core.anything", source) == rewritten


def test_the_platform_refuses_what_it_cannot_adapt_and_then_trains_nothing_of_torch_changed() -> None:
    # One process for all: importing torch takes seconds.
    script = """
        import importlib.metadata, sys, types
        from unittest import mock
        import torch
        from twinkle_megatron import PlatformError, cpu

        def refused(words):
            try:
                cpu.enable()
            except PlatformError as error:
                assert words in str(error), error
                assert not cpu.is_enabled()
            else:
                raise AssertionError(f"not refused: {words}")

        assert "megatron.core" not in sys.modules
        with mock.patch.object(importlib.metadata, "version", return_value="0.17.0"):
            refused("0.17.0 is installed")
        with mock.patch.dict(sys.modules, {"megatron.core": types.ModuleType("megatron.core")}):
            refused("imported before")
        with mock.patch.object(torch.cuda, "is_initialized", return_value=True):
            refused("CUDA is in use")
        before = dict(vars(torch.cuda))
        cpu.enable()
        cpu.enable()
        assert cpu.is_enabled()
        import megatron.core.tensor_parallel.random
        assert {name: value for name, value in vars(torch.cuda).items() if name in before} == before
        print("fine")
    """
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=110, check=False)
    assert ran.stdout.strip().endswith("fine"), ran.stderr


def test_importing_the_package_imports_neither_megatron_nor_mbridge() -> None:
    script = "import sys, twinkle_megatron; print([m for m in ('megatron', 'mbridge', 'transformers') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=110, check=False)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


def test_nothing_is_written_beside_megatrons_sources() -> None:
    # The rewritten modules' bytecode must not land in __pycache__, where an unmodified run would load it.
    from twinkle_megatron import cpu

    cpu.enable()
    import megatron.core.tensor_parallel.random as module

    assert "_twinkle_cuda" in vars(module)
    loader = module.__spec__.loader if module.__spec__ else None
    assert type(loader).__name__ == "_RewritingLoader"
    cached = Path(importlib.util.cache_from_source(str(module.__file__)))
    assert not cached.exists() or b"_twinkle_cuda" not in cached.read_bytes()
