from xml.etree import ElementTree

import pytest

from twinkle import MissingExtraError
from twinkle.cli.main import main
from twinkle.installed import PARTS, missing_parts, require_parts
from twinkle.recipes import write_tiny_qwen3
from twinkle_data.toy import toy_tokenizer


def test_help_and_no_command(capsys):
    assert main(["--help"]) == 0
    assert "topology" in capsys.readouterr().out
    assert main([]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpro"], "unknown command gpro: did you mean grpo?"),
        (["grpo", "--stepz", "3"], "did you mean --steps"),
        (["grpo", "--model", "no/such/folder"], "there is no such folder; give the folder of a Hugging Face checkpoint"),
        (["sft", "--dataset", "absent.jsonl"], "there is no such file; give a JSONL, JSON, Parquet or CSV file"),
        (["grpo", "--task.size", "100"], "Raise --task.size, or lower --task.held-out"),
        (["grpo", "--replay", "no/such/run"], "give the folder of a run that was made with --record"),
        (["grpo", "--runtime.device", "cuda"], "use --runtime.device cpu"),
        (["doctor", "--fix"], "doctor takes no options"),
        (["--actor.tp", "2"], "name a command before its options, such as: twinkle grpo --actor.tp 2"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2_and_the_fix(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []  # nothing was started or left behind


def test_every_command_explains_itself(capsys):
    for argv in (["help"], ["doctor", "--help"]):
        assert main(argv) == 0
        assert "usage: twinkle" in capsys.readouterr().out


def test_a_run_folder_given_as_the_model_is_told_from_its_checkpoint(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")  # of the run, not of a model
    (tmp_path / "run" / "checkpoint" / "config.json").write_text("{}")
    assert main(["grpo", "--model", "run"]) == 2
    assert "no *.safetensors; give --model run/checkpoint" in " ".join(capsys.readouterr().err.split())


def test_a_layout_that_the_model_cannot_have_is_refused_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_tiny_qwen3(tmp_path / "model", toy_tokenizer(["1 + 2 = 3"]), seed=0)
    for command in ("grpo", "sft"):
        assert main([command, "--model", str(model), "--actor.tp", "3"]) == 1
        assert "tp_size=3 does not divide the model's 4 attention heads" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "2"}', "row 1 (chats.jsonl, line 2)"),
        ('{"messages": [{"role": "user"}]}', "row 1 (chats.jsonl, line 2)"),
        ('{"prompt": "2", "chosen": "a", "rejected": "b"}', "row 1 is a preference pair (chosen and rejected)"),
        ("{", "line 2: not valid JSON"),
    ],
)
def test_a_wrong_row_of_a_dataset_is_named(line, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}]}\n' + line + "\n")
    assert main(["sft", "--dataset", "chats.jsonl"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "--dataset chats.jsonl" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_topology_draws_both_groups(capsys):
    assert main(["topology", "--actor.tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "actor" in shown
    assert "sampler" in shown


def test_topology_writes_an_svg_file(tmp_path, capsys):
    target = tmp_path / "topology.svg"
    assert main(["topology", "--runtime.device", "cpu", "--actor.tp", "2", "--sampler.dp", "3", "--svg", str(target)]) == 0
    assert "wrote" in capsys.readouterr().out
    root = ElementTree.parse(target).getroot()
    shown = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"group actor: 2 cpu workers", "group sampler: 3 cpu workers", "MegatronModel", "vLLMSampler"} <= shown


def test_topology_takes_the_options_of_grpo_and_names_a_file_that_cannot_be(tmp_path, capsys):
    assert main(["topology", "--svg", str(tmp_path / "absent" / "x.svg")]) == 2
    assert "the file cannot be written: No such file or directory" in " ".join(capsys.readouterr().err.split())
    assert main(["topology", "--sgv", "x.svg"]) == 2
    assert "did you mean --svg" in capsys.readouterr().err


def test_doctor_names_versions_and_the_machine(capsys):
    assert main(["doctor"]) == (1 if missing_parts() else 0)
    shown = capsys.readouterr().out
    for part in PARTS:
        assert part.distribution in shown
    assert "usable cores" in shown


def test_what_is_missing_is_named_with_its_install_line(monkeypatch, capsys):
    import twinkle.installed as installed

    monkeypatch.setattr(installed, "installed_version", lambda part: None if part.distribution == "ray" else "1.0")
    with pytest.raises(MissingExtraError, match=r"ray \(several processes and machines\) is not installed: pip install 'twinkle-rl\[ray\]'"):
        require_parts(["transformers", "ray"])
    require_parts(["transformers"])
    assert main(["doctor"]) == 1
    assert "pip install 'twinkle-rl[ray]'" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["grpo", "sft"])
@pytest.mark.parametrize(
    ("backend", "absent", "message"),
    [
        ("megatron", "megatron-core", "megatron-core (training engine) is not installed: pip install 'twinkle-rl[megatron]'"),
        ("transformers", "twinkle-transformers", "twinkle-transformers (TransformersModel) is not installed: pip install 'twinkle-rl[transformers]'"),
    ],
)
def test_a_command_without_its_engine_ends_before_it_starts_anything(command, backend, absent, message, monkeypatch, capsys, tmp_path):
    import twinkle.installed as installed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed, "installed_version", lambda part: None if part.distribution == absent else "1.0")
    assert main([command, "--backend", backend]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
