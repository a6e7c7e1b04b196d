"""Options: defaults, the checks of each and between them, and the messages a user sees."""

import dataclasses
import pickle
from pathlib import Path

import pydantic
import pytest

from qerl_jax.config import (
    Config,
    DataOptions,
    GenerationOptions,
    GrpoOptions,
    NoiseOptions,
    OptimizerOptions,
)
from qerl_jax.config_errors import option_names
from qerl_jax.config_files import config_from_dict, config_to_dict, load_config, save_yaml
from qerl_jax.errors import UserError

CISPO = ["grpo.loss_type=cispo", "grpo.epsilon_high=5.0"]


def message(*overrides: str, recipe: str = "quickstart") -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize("name", ["quickstart", "configs/quickstart.yaml"])
def test_quickstart_loads_by_name_and_path_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert config.model.model_name_or_path == "builtin:quickstart"
    assert config.run.output_dir == "runs/quickstart"
    assert config.noise.num_stages == 10
    assert [f.function for f in config.reward.functions] == ["accuracy", "format"]


@pytest.mark.parametrize(
    "option",
    ["model.model_name_or_path", "lora.adapter", "data.train_dataset", "evaluation.eval_dataset", "run.output_dir"],
)
def test_a_path_may_begin_at_home(option, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, name = option.split(".")
    assert getattr(getattr(load_config("quickstart", [f"{option}=~/mine"]), section), name) == f"{tmp_path}/mine"


def test_a_reward_file_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("quickstart", ["reward.functions=[{function: '~/mine.py:score'}]"])
    assert config.reward.functions[0].function == f"{tmp_path}/mine.py:score"


def test_every_shipped_recipe_is_valid():
    recipes = list((Path(__file__).parent.parent / "configs").glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert load_config(str(path)).run.output_dir == f"runs/{path.stem}"


def test_defaults_of_the_method():
    config = Config(optimizer=OptimizerOptions(max_steps=20))
    assert (config.optimizer.learning_rate, config.optimizer.adam_beta2, config.optimizer.max_grad_norm) == (
        1e-5,
        0.99,
        0.2,
    )
    assert (config.grpo.epsilon, config.grpo.epsilon_high, config.grpo.beta) == (0.2, 0.28, 0.0)
    assert (config.run.save_steps, config.run.save_total_limit, config.run.max_nonfinite_steps) == (10, 3, 3)
    assert (config.noise.sigma_start, config.noise.sigma_end, config.noise.num_stages) == (1e-2, 5e-4, 10)
    assert hash(config) == hash(Config(optimizer=OptimizerOptions(max_steps=20)))


def test_derived_values():
    config = Config(
        optimizer=OptimizerOptions(max_steps=40, per_device_train_batch_size=4, gradient_accumulation_steps=2),
        grpo=GrpoOptions(steps_per_generation=8, num_iterations=2),
        generation=GenerationOptions(num_generations=8),
        noise=NoiseOptions(num_stages=5),
        run=dataclasses.replace(Config(optimizer=OptimizerOptions(max_steps=20)).run, save_steps=8),
    )
    assert config.completions_per_rollout == 32
    assert config.prompts_per_rollout == 4
    assert config.updates_per_rollout == 8
    assert config.total_steps(dataset_length=1) == 40


def test_total_steps_of_epochs_are_whole_rollouts():
    config = Config(optimizer=OptimizerOptions(num_train_epochs=1.5), noise=NoiseOptions(num_stages=3))
    assert config.prompts_per_rollout == 16
    assert config.total_steps(dataset_length=100) == 10  # 150 prompts / 16, rounded up
    with pytest.raises(UserError, match=r"noise.num_stages is 3; allowed: at most the 1 rollouts that"):
        config.total_steps(dataset_length=8)
    decimal = Config(optimizer=OptimizerOptions(num_train_epochs=1.1))
    assert decimal.total_steps(dataset_length=10 * decimal.prompts_per_rollout) == 11 * decimal.updates_per_rollout
    endless = Config(optimizer=OptimizerOptions(num_train_epochs=1e30))
    with pytest.raises(UserError, match=r"num_train_epochs is 1e\+30, which gives .*; allowed: fewer than 2\^31 steps"):
        endless.total_steps(dataset_length=8)
    longest = Config(optimizer=OptimizerOptions(num_train_epochs=float(2**31 - 1)))
    assert longest.total_steps(dataset_length=16) == 2**31 - 1
    with pytest.raises(UserError, match=r"allowed: fewer than 2\^31 steps"):
        Config(optimizer=OptimizerOptions(num_train_epochs=2.0**31)).total_steps(dataset_length=16)


def test_stages_of_epochs_are_held_against_rollouts_not_steps():
    optimizer, grpo = OptimizerOptions(num_train_epochs=1), GrpoOptions(num_iterations=2)
    config = Config(optimizer=optimizer, grpo=grpo, noise=NoiseOptions(num_stages=3))
    assert config.total_steps(dataset_length=48) == 6
    with pytest.raises(UserError, match=r"noise.num_stages is 3; allowed: at most the 2 rollouts that"):
        config.total_steps(dataset_length=32)


def test_overrides_are_yaml_1_2_values():
    config = load_config(
        "quickstart", ["optimizer.learning_rate=1e-4", "run.output_dir=off", "lora.lora_target_modules=[q_proj]"]
    )
    assert config.optimizer.learning_rate == 1e-4
    assert config.run.output_dir == "off"
    assert config.lora.lora_target_modules == ("q_proj",)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate=1e-4", "command line: unknown section learning_rate: it lives in optimizer.learning_rate"),
        ("cap=1.5", "it lives in grpo.sampler_correction.cap"),
        ("temperature=1.5", "it lives in generation.temperature and evaluation.temperature"),
        ("optimizer.lerning_rate=1", "unknown option optimizer.lerning_rate (did you mean 'learning_rate'?)"),
        ("optimiser.max_steps=1", "command line: unknown section optimiser (did you mean 'optimizer'?)"),
        ("noise.max_step=4", "unknown option noise.max_step (did you mean 'optimizer.max_steps'?)"),
        ("grpo.sampler_correction.lvl=token", "grpo.sampler_correction.lvl (did you mean 'level'?)"),
        (
            "reward.functions=[{function:mine.py:f}]",
            "unknown option reward.functions.0.function:mine.py:f; YAML wants a space after the colon: "
            "`function: mine.py:f`",
        ),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast'; allowed: a number from 1e-30 to 1e30"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate is true; allowed: a number from 1e-30 to 1e30"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate is nan; allowed: a number from 1e-30 to 1e30"),
        ("model.dtype=fp16", "model.dtype is 'fp16'; allowed: auto, float32, bfloat16, float16"),
        ("optimizer.max_steps=2.5", "optimizer.max_steps is 2.5; allowed: a whole number from 1 to 2^31 - 1 or null"),
        (
            "optimizer.max_steps=2147483648",
            "optimizer.max_steps is 2147483648; allowed: a whole number from 1 to 2^31 - 1 or null",
        ),
        ("run.seed=4294967296", "run.seed is 4294967296; allowed: a whole number from 0 to 2^32 - 1"),
        ("optimizer.adam_beta2=1.0", "optimizer.adam_beta2 is 1.0; allowed: a number from 0 to below 1"),
        ("reward.timeout=0.0", "reward.timeout is 0.0; allowed: a number of seconds above 0"),
        ("lora.train_norms=off", "lora.train_norms is 'off'; allowed: true or false"),
        ("generation.num_generations=1", "generation.num_generations is 1; allowed: a whole number >= 2"),
        ("generation.top_p=0", "generation.top_p is 0; allowed: a number from 1e-30 to 1"),
        ("generation.top_p=1e-308", "generation.top_p is 1e-308; allowed: a number from 1e-30 to 1"),
        ("generation.kv_cache_gb=1e308", "generation.kv_cache_gb is 1e+308; allowed: a number from 1e-30 to 1e30"),
        (
            "grpo.dynamic_sampling.max_rounds=0",
            "grpo.dynamic_sampling.max_rounds is 0; allowed: a whole number from 1",
        ),
        ("max_rounds=4", "it lives in grpo.dynamic_sampling.max_rounds"),
        ("grpo.beta=1e308", "grpo.beta is 1e+308; allowed: a number from 0 to 1e30"),
        ("grpo.loss_type=gspo", "grpo.loss_type is 'gspo'; allowed: grpo, bnpo, dapo, dr_grpo, cispo"),
        ("grpo.importance_sampling_level=row", "grpo.importance_sampling_level is 'row'; allowed: token, sequence"),
        ("importance_sampling_level=sequence", "it lives in grpo.importance_sampling_level"),
        ("grpo.top_entropy_quantile=0", "grpo.top_entropy_quantile is 0; allowed: a number from 1e-30 to 1"),
        ("grpo.top_entropy_quantile=1.2", "grpo.top_entropy_quantile is 1.2; allowed: a number from 1e-30 to 1"),
        ("top_entropy_quantile=0.2", "it lives in grpo.top_entropy_quantile"),
        ("grpo.delta=0", "grpo.delta is 0; allowed: a number from 1e-30 to 1e30 or null"),
        ("noise.sigma_start=", "noise.sigma_start is null; allowed: a number from 1e-30 to 1e30"),
        ("noise.sigma_start=1e308", "noise.sigma_start is 1e+308; allowed: a number from 1e-30 to 1e30"),
        (
            'run.output_dir="a\\0b"',
            r"run.output_dir is 'a\x00b'; allowed: a text that is not empty, without NUL or null",
        ),
        ("noise=3", "noise is 3; allowed: a mapping with the options num_stages"),
        ("noise.num_stages.x=3", "noise.num_stages is 10 and has no options"),
        ("lora.lora_target_modules=[x]", "lora.lora_target_modules.0 is 'x'; allowed: q_proj, k_proj"),
        ("lora.lora_target_modules=[]", "lora.lora_target_modules is []; allowed: one projection or more"),
        ("reward.functions=[{function: a}, {function: a}]", "reward.functions is ['a', 'a']; allowed: each name once"),
        ("reward.functions=[{weight: 1}]", "reward.functions.0.function is missing; allowed: a text"),
        ("reward.functions=[]", "reward.functions is []; allowed: one function or more"),
        (
            "reward.functions=[{function: accuracy, weight: 0}]",
            "reward.functions have weight 0 each, and nothing would be learned; allowed: another for one",
        ),
        (
            "data.chat_template_kwargs=off",
            "data.chat_template_kwargs is 'off'; allowed: a mapping of variables of the chat template to JSON values "
            "(texts, numbers, true, false, null, lists, mappings) or null",
        ),
        ("data.chat_template_kwargs={3: x}", "command line: data.chat_template_kwargs is {3: 'x'}; allowed: a mapping"),
        ("data.chat_template_kwargs={x: .nan}", "data.chat_template_kwargs is {'x': nan}; allowed: a mapping"),
        (
            "data.chat_template_kwargs.date_string=2024-07-26",
            "command line: data.chat_template_kwargs is {'date_string': datetime.date(2024, 7, 26)}; allowed: a ",
        ),
        ("chat_template_kwargs={x: 1}", "unknown section chat_template_kwargs: it lives in data.chat_template_kwargs"),
        ("report_to", "'report_to' is not an override; expected section.option=value"),
        ("run.report_to=[x", "run.report_to: '[x' is not readable as a YAML value"),
    ],
)
def test_one_wrong_override(override, expected):
    assert expected in message(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generation.num_generations=6"], "generation.num_generations is 6; allowed: a divisor of the 128"),
        (["grpo.steps_per_generation=6"], "grpo.steps_per_generation is 6; allowed: a multiple of"),
        (["noise.num_stages=61"], "noise.num_stages is 61; allowed: at most optimizer.max_steps 60"),
        (
            ["noise.num_stages=31", "grpo.num_iterations=2"],
            "at most optimizer.max_steps 60 / the 2 steps that follow each rollout, so that every stage has a rollout",
        ),
        (["grpo.num_iterations=7"], "optimizer.max_steps is 60; allowed: a multiple of the 7 optimizer steps"),
        (["grpo.num_iterations=2", "run.save_steps=5"], "run.save_steps is 5; allowed: a multiple of the 2"),
        (["grpo.num_iterations=2", "evaluation.eval_steps=5"], "evaluation.eval_steps is 5; allowed: a multiple of"),
        (["optimizer.num_train_epochs=1"], "optimizer.max_steps is 60 and optimizer.num_train_epochs is 1.0; allowed:"),
        (
            ["grpo.dynamic_sampling.metric=acuracy"],
            "grpo.dynamic_sampling.metric is 'acuracy' (did you mean 'accuracy'?); allowed: the name of a function of "
            "reward.functions (accuracy, format) or null",
        ),
        (
            ["grpo.dynamic_sampling.metric=f", "reward.functions=[{function: 'a:f'}, {function: 'b:f'}]"],
            "grpo.dynamic_sampling.metric is 'f'; allowed: the name of a function of reward.functions (a:f, b:f)",
        ),
        (
            ["reward.functions=[{function: soft_overlong_punishment}]"],
            "reward.soft_punish_cache is null; allowed with soft_overlong_punishment in reward.functions: a whole "
            "number >= 1 and below generation.max_completion_length 48",
        ),
        (
            ["reward.functions=[{function: soft_overlong_punishment}]", "reward.soft_punish_cache=48"],
            "reward.soft_punish_cache is 48; allowed with",
        ),
        (["grpo.loss_type=cispo"], "grpo.epsilon_high is 0.28; allowed with grpo.loss_type cispo: a number >= 1, the "
                                   "largest ratio itself (5 is usual)"),
        (["grpo.loss_type=cispo", "grpo.epsilon_high=0.99"], "grpo.epsilon_high is 0.99; allowed with grpo.loss_type"),
        (["grpo.delta=1.28", "grpo.num_iterations=2"], "grpo.delta is 1.28; allowed: above 1 + grpo.epsilon_high, "
                                                       "which is 1.28, or null"),
        (["grpo.delta=2.0", "grpo.epsilon_high=1.5", "grpo.num_iterations=2"], "grpo.delta is 2.0; allowed: above 1 +"),
        (["optimizer.max_steps=null"], "optimizer.max_steps is null and optimizer.num_train_epochs is null"),
        (["optimizer.per_device_train_batch_size=2147483640"], "optimizer.per_device_train_batch_size is 2147483640; "
                                                               "allowed: at most "),
        (["optimizer.per_device_train_batch_size=24403224"], "optimizer.per_device_train_batch_size is 24403224; "
                                                             "allowed: at most 24403223 rows of 88 tokens"),
        (["optimizer.gradient_accumulation_steps=67108864"],
         "optimizer.gradient_accumulation_steps is 67108864; allowed: at most 67108863 with"),
        (["data.max_prompt_length=2147483647"], "data.max_prompt_length is 2147483647 and "
                                                "generation.max_completion_length is 48; allowed: a sum below 2^31"),
        (["generation.max_completion_length=2147483647"],
         "command line: generation.max_completion_length is 2147483647 and data.max_prompt_length is 40; allowed: a "),
        (["optimizer.gradient_accumulation_steps=100000000"],
         "optimizer.gradient_accumulation_steps is 100000000; allowed: at most 67108863 with "
         "optimizer.per_device_train_batch_size 32, so that an optimizer step has fewer than 2^31 completions"),
        (["grpo.steps_per_generation=100000000"], "grpo.steps_per_generation is 100000000; allowed: at most 67108863 "
                                                  "with optimizer.per_device_train_batch_size 32, so that a rollout"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(overrides, expected):
    assert expected in message(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.gradient_accumulation_steps=100000000"],
        ["data.max_prompt_length=2147483647"],
        ["generation.max_completion_length=2147483647"],
    ],
)
def test_a_number_beyond_int32_is_told_once(overrides):
    assert len(message(*overrides).splitlines()) == 1


def test_an_option_written_in_a_file_as_on_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text("run.seed: 3\nmax_steps.x: 2\n")
    with pytest.raises(UserError) as error:
        load_config(str(tmp_path / "c.yaml"))
    first, second = str(error.value).splitlines()
    assert first.endswith("c.yaml, line 1: unknown section run.seed; in a file a section holds its options: "
                          "`run: {seed: ...}`")  # fmt: skip
    assert "line 2: unknown section max_steps.x" in second and "in a file" not in second


def test_all_problems_are_told_at_once_with_their_lines(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("optimizer:\n  max_steps: ten\n  lerning_rate: 3\nnosie: {}\n3: 4\n")
    first, second, *rest = message(recipe=str(path)).splitlines()
    assert first == f"{path}, line 2: optimizer.max_steps is 'ten'; allowed: a whole number from 1 to 2^31 - 1 or null"
    assert second.startswith(f"{path}, line 3: unknown option optimizer.lerning_rate (did you mean 'learning_rate'?)")
    assert rest[0].startswith(f"{path}, line 4: unknown section nosie (did you mean 'noise'?)")
    assert "3 is not the name of an option; allowed: a mapping with the options model, lora" in rest[1]


def test_options_that_do_not_go_together_have_their_places(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("generation:\n  num_generations: 7\noptimizer:\n  max_steps: 10\ngrpo:\n  num_iterations: 3\n")
    first, second, default, last = message("noise.num_stages=20", recipe=str(path)).splitlines()
    assert first.startswith(f"{path}, line 2: generation.num_generations is 7; allowed: ")
    assert second.startswith(f"{path}, line 4: optimizer.max_steps is 10; allowed: a multiple of the 3 ")
    assert default.startswith("run.save_steps is 10; allowed: ")
    assert last.startswith("command line: noise.num_stages is 20; allowed: at most ")
    path.write_text(
        "optimizer: {max_steps: 10}\n"
    )  # with the default of an option goes the place of what it does not go with
    (line,) = message("optimizer.per_device_train_batch_size=3", recipe=str(path)).splitlines()
    assert line.startswith("command line: generation.num_generations is ")


def test_an_option_inside_a_list_has_its_own_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "reward:\n  functions:\n    - function: accuracy\n    - function: format\n      wieght: 2\n"
        "run:\n  report_to:\n    - tensorboard\n    - wandbb\n"
    )
    first, second = message(recipe=str(path)).splitlines()
    assert first.startswith(f"{path}, line 5: unknown option reward.functions.1.wieght (did you mean 'weight'?)")
    assert second.startswith(f"{path}, line 9: run.report_to.1 is 'wandbb'; allowed: ")
    assert message("reward.functions=[{wieght: 1}]", recipe=str(path)).startswith("command line: ")


def test_variables_of_the_chat_template(tmp_path):
    rows = "data.train_dataset=rows.jsonl"
    plain = load_config("quickstart", [rows])
    given = load_config("quickstart", [rows, "data.chat_template_kwargs={enable_thinking: false}"])
    by_name = load_config("quickstart", [rows, "data.chat_template_kwargs.enable_thinking=false"])
    assert given == by_name != plain and hash(given) == hash(by_name) != hash(plain)
    assert given.data.chat_template_kwargs == {"enable_thinking": False}
    assert given == pickle.loads(pickle.dumps(given)) == dataclasses.replace(given, data=given.data)
    in_a_script = DataOptions("rows.jsonl", chat_template_kwargs={"enable_thinking": False})
    assert dataclasses.replace(given.data, max_prompt_length=48) == in_a_script
    assert given != load_config("quickstart", [rows, "data.chat_template_kwargs.enable_thinking=0"])
    assert load_config("quickstart", [rows, "data.chat_template_kwargs={}"]) == plain
    path = tmp_path / "mine.yaml"
    save_yaml(given, path)
    words = ["data.chat_template_kwargs.enable_thinking=true", "data.chat_template_kwargs.x=[1]"]
    assert load_config(str(path), words).data.chat_template_kwargs == {"enable_thinking": True, "x": [1]}
    save_yaml(plain, path)
    assert load_config(str(path), ["data.chat_template_kwargs.enable_thinking=false"]) == given


def test_variables_of_the_chat_template_where_all_prompts_are_texts(tmp_path):
    for word in ("data.chat_template_kwargs={x: 1}", "data.chat_template_kwargs.x=1"):
        assert message(word) == (
            "command line: data.chat_template_kwargs has no effect in this run: the prompts of arithmetic are texts, "
            "which pass no chat template; leave it out"
        )
        load_config("quickstart", [word, "evaluation.eval_dataset=rows.jsonl"])
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: {train_dataset: a.jsonl, chat_template_kwargs: {x: 1}}\noptimizer: {max_steps: 20}\n"
        "noise: {num_stages: 5}\n"
    )
    silenced = "data.train_dataset=arithmetic"
    assert load_config(str(path), [silenced]).data.chat_template_kwargs is None
    assert "command line: data.chat_template_kwargs has no" in message(
        silenced, "data.chat_template_kwargs.x=2", recipe=str(path)
    )


KWARGS = ["data.train_dataset=a", "data.chat_template_kwargs={x: [1, {z: null, a: é}], on: false, 'off': 1.5}"]


@pytest.mark.parametrize(
    "options", [[], ["noise.num_stages=1"], ["lora.adapter=a/b", "grpo.num_iterations=2"], CISPO, KWARGS]
)
def test_saved_yaml_reads_back_as_the_same_config(tmp_path, options):
    config = load_config("quickstart", options)
    save_yaml(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml")) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_dictionary_round_trip_holds_every_option():
    config = load_config("quickstart")
    values = config_to_dict(config)
    assert config_from_dict(values) == config
    for name in option_names(Config):
        section = values
        for part in name.split("."):
            section = section[part]


def test_scripts_get_a_value_error_at_once():
    with pytest.raises(pydantic.ValidationError, match="greater than or equal to 1"):
        OptimizerOptions(max_steps=0)
    with pytest.raises(ValueError, match="exactly one of them"):
        Config()


def test_numbers_that_python_does_not_write_are_told():
    assert message(f"run.seed=0x{'f' * 5000}").startswith(
        "command line: run.seed is a whole number of thousands of digits"
    )
    assert "command line: data.chat_template_kwargs" in message(f"data.chat_template_kwargs={{a: 0x{'f' * 5000}}}")


def test_a_folder_whose_name_is_no_text_is_told(tmp_path):
    recipe = tmp_path / "a\udcff.yaml"
    recipe.write_text("optimizer: {max_steps: 10}\n")
    assert message(recipe=str(recipe)).startswith(r"'runs/a\udcff': a run's folder has a name in UTF-8; rename")


def test_bytes_that_the_locale_cannot_read_are_no_fault_of_the_yaml():
    with pytest.raises(
        UserError, match=r"data.train_dataset: 'd.*ta.jsonl' has bytes that the locale, .*, cannot read; set LC"
    ):
        load_config("quickstart", ["data.train_dataset=d\udcc3\udca4ta.jsonl"])
