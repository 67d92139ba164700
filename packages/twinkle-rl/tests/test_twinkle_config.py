import pytest

from twinkle import ConfigError
from twinkle.config import GRPOConfig, SFTConfig


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)


def test_the_tiny_preset_is_the_default():
    config = GRPOConfig.load([])
    assert (config.preset, config.steps, config.warmup.enabled) == ("tiny", 120, True)


def test_a_preset_changes_defaults_and_a_flag_beats_the_preset():
    config = GRPOConfig.load(["--preset", "smollm2", "--steps", "2"])
    assert (config.steps, config.warmup.enabled, config.task.few_shot) == (2, False, 3)
    assert config.task.terms == 4  # what the preset does not name keeps the class's default


def test_flag_beats_environment_beats_file_beats_preset(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('preset = "smollm2"\nsteps = 7\nlr = 0.5\n[actor]\ntp = 4\n[task]\nheld_out = 20\n')
    monkeypatch.setenv("TWINKLE_STEPS", "8")
    monkeypatch.setenv("TWINKLE_ACTOR__TP", "2")
    config = GRPOConfig.load(["--config", str(file), "--lr", "0.25"])
    assert (config.lr, config.steps, config.actor.tp, config.task.held_out, config.task.few_shot) == (0.25, 8, 2, 20, 3)


def test_a_misspelt_variable_is_an_error_and_those_of_others_are_left_alone(monkeypatch):
    for foreign in ("TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TWINKLE_DATASET", "TWINKLE_X"):
        monkeypatch.setenv(foreign, "1")
    GRPOConfig.load([])
    for wrong, right in {"TWINKLE_STEP": "TWINKLE_STEPS", "TWINKLE_ACTORS__TP": "TWINKLE_ACTOR"}.items():
        monkeypatch.setenv(wrong, "1")
        with pytest.raises(ConfigError, match=f"{wrong}: there is no such setting; did you mean {right}"):
            GRPOConfig.load([])
        monkeypatch.delenv(wrong)


def test_flags_of_one_section_do_not_reset_the_rest_of_it():
    config = GRPOConfig.load(["--preset=smollm2", "--task.terms", "3"])
    assert (config.task.terms, config.task.few_shot) == (3, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--actor.tpp", "2"], "unknown option --actor.tpp: did you mean --actor.tp"),
        (["--zzzz"], "unknown option --zzzz: --help lists all options"),
        (["--actor.tp", "0"], "--actor.tp: Input should be greater than or equal to 1"),
        (["--steps", "many"], "--steps: Input should be a valid integer"),
        (["--preset", "huge"], "unknown preset 'huge': there are tiny, smollm2"),
        (["--config", "absent.toml"], "--config absent.toml: No such file"),
        (["--config"], "--config needs a value"),
        (["--runtime.mode", "local", "--actor.dp", "2"], "use --runtime.mode ray"),
        (["--actor.sequence-parallel"], "set --actor.tp 2 or more"),
        (["--actor.vpp", "2"], "set --actor.pp 2 or more"),
        (["--prompts-per-step", "3", "--num-samples", "3", "--actor.dp", "2"], "do not divide over the actor's 2 data ranks"),
        (["--actor.fsdp", "2"], "layouts of --backend transformers"),
        (["--backend", "transformers", "--actor.tp", "2"], "layouts of --backend megatron; transformers has --actor.dp, --actor.fsdp"),
        (["--warmup.max-steps", "50"], "lower --warmup.min-steps"),
        (["--prompts-per-step", "1", "--sampler.dp", "2"], "less than sampler.dp=2"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(argv, message):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.load(argv)
    assert message in str(caught.value)


def test_an_unknown_key_in_a_file_is_an_error_that_names_the_right_one(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[sampler]\nmax_model_length = 3\n")
    with pytest.raises(ConfigError, match=r"did you mean sampler\.max_model_len"):
        GRPOConfig.load(["--config", str(file)])


def test_a_wrong_setting_of_the_file_is_not_told_as_a_flag(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[actor]\ntpp = 2\n")
    with pytest.raises(ConfigError, match=r"^actor\.tpp in the file of --config: there is no such setting; did you mean actor\.tp"):
        GRPOConfig.load(["--config", str(file)])


def test_a_model_of_ones_own_is_not_warmed_up_unless_asked_for(tmp_path, monkeypatch):
    assert not GRPOConfig.load(["--model", "mine"]).warmup.enabled
    assert GRPOConfig.load(["--model", "mine", "--warmup.enabled"]).warmup.enabled
    file = tmp_path / "run.toml"
    file.write_text('model = "mine"\n')
    assert not GRPOConfig.load(["--config", str(file)]).warmup.enabled
    monkeypatch.setenv("TWINKLE_MODEL", "mine")
    assert not GRPOConfig.load([]).warmup.enabled


def test_a_file_that_is_not_toml_is_an_error_that_names_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = \n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        GRPOConfig.load(["--config", str(file)])


@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig])
def test_help_explains_every_field(config, capsys):
    with pytest.raises(SystemExit) as ended:
        config.load(["--help"], prog="twinkle")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())

    def check(model, prefix):
        for name, field in model.model_fields.items():
            option = f"{prefix}{name.replace('_', '-')}"
            if hasattr(field.annotation, "model_fields"):
                check(field.annotation, f"{option}.")
            else:
                assert option in shown
                assert field.description, option
                assert " ".join(field.description.split()[:3]) in shown, option

    check(config, "--")


def test_a_resolved_configuration_can_be_read_back_as_a_file(tmp_path):
    config = GRPOConfig.load(["--preset", "smollm2", "--actor.tp", "2", "--steps", "9"])
    lines, sections = [], []
    for key, value in config.model_dump(mode="json", exclude_none=True).items():
        if isinstance(value, dict):
            sections += [f"[{key}]", *(f"{k} = {_toml(v)}" for k, v in value.items())]
        else:
            lines.append(f"{key} = {_toml(value)}")
    file = tmp_path / "run.toml"
    file.write_text("\n".join([*lines, *sections]))
    assert GRPOConfig.load(["--config", str(file)]).model_dump() == config.model_dump()


def _toml(value):
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def test_a_resumed_run_has_its_own_settings_and_only_what_changes_no_number_may_change(tmp_path, monkeypatch):
    first = GRPOConfig.load(["--preset", "smollm2", "--lr", "0.5", "--steps", "7", "--task.terms", "3", "--run-dir", str(tmp_path)])
    (tmp_path / "config.json").write_text(first.model_dump_json())
    again = GRPOConfig.load(["--resume", str(tmp_path), "--steps", "9", "--actor.tp", "2", "--checkpoint-keep", "5"])
    changed = {"resume": tmp_path, "steps": 9, "checkpoint_keep": 5, "actor": first.actor.model_copy(update={"tp": 2})}
    assert again == first.model_copy(update=changed)
    for words, message in (
        (["--lr", "0.25"], r"lr \(0.5, now 0.25\)"),
        (["--preset", "tiny"], r"preset \('smollm2', now 'tiny'\)"),
        (["--run-dir", "elsewhere"], "leave --run-dir out"),
        (["--replay", "elsewhere"], "leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=message):
            GRPOConfig.load(["--resume", str(tmp_path), *words])
    monkeypatch.setenv("TWINKLE_RESUME", str(tmp_path))
    assert GRPOConfig.load([]) == first.model_copy(update={"resume": tmp_path})
    with pytest.raises(ConfigError, match=r"no config\.json of a run"):
        GRPOConfig.load(["--resume", str(tmp_path / "absent")])
