"""PEFT folders: read as PEFT wrote them, written so that it reads them, and refused by name when they do not fit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from folders import edit_arrays, edit_options
from tiny import tiny_adapter, tiny_model

from qerl_jax.errors import UserError
from qerl_jax.models.config import MLP
from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS, Adapter, TrainedNorms, lora_alpha, lora_scaling
from qerl_jax.models.peft import adapter_fingerprint, load_adapter, open_adapter, save_adapter

ORACLES = Path(__file__).parent / "oracles"


@pytest.fixture(scope="module")
def model():
    return tiny_model(weight_format="bf16")


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)  # scalings and module names are in it
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype == jnp.float32 and np.array_equal(x, y)


@pytest.mark.parametrize("options", [{}, {"train_norms": True}, {"target_modules": ["up_proj", "q_proj"]}])
def test_round_trip(tmp_path, model, options):
    adapter = tiny_adapter(model, **options)
    save_adapter(adapter, tmp_path / "adapter", "some/base")
    assert_same(load_adapter(tmp_path / "adapter", model), adapter)
    save_adapter(tiny_adapter(model, seed=5), tmp_path / "adapter", "some/base")  # a later save replaces it
    assert_same(load_adapter(tmp_path / "adapter", model), tiny_adapter(model, seed=5))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_format_of_the_weights_has_a_file_of_its_own(tmp_path, model):
    """PEFT refuses, or leaves out, what its options do not have."""
    adapter = tiny_adapter(model)
    save_adapter(adapter, tmp_path / "plain", "b")
    for _ in range(2):  # the second takes the first one's place
        save_adapter(adapter, tmp_path / "a", "b", weight_format="nvfp4")
    assert (tmp_path / "a" / "qerl_adapter.json").read_text() == '{\n  "weight_format": "nvfp4"\n}\n'
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert_same(load_adapter(tmp_path / "a", model), adapter)
    save_adapter(adapter, tmp_path / "a", "b")
    assert not (tmp_path / "a" / "qerl_adapter.json").exists()
    with pytest.raises(UserError, match="weight_format is 'fp4'; allowed: nvfp4, "):
        save_adapter(adapter, tmp_path / "a", "b", weight_format="fp4")


def test_the_folder_is_what_peft_documents(tmp_path, model):
    adapter = tiny_adapter(model, train_norms=True)
    save_adapter(adapter, tmp_path / "a", "some/base")
    options = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert {key: options[key] for key in ("r", "lora_alpha", "peft_type", "task_type", "bias")} == {
        "r": 4,
        "lora_alpha": 8,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    assert options["modules_to_save"] == ["input_layernorm", "post_attention_layernorm"]
    assert options["base_model_name_or_path"] == "some/base"
    arrays = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    assert np.array_equal(arrays[name + "A.weight"], adapter.lora[1]["down_proj"].a)
    assert np.array_equal(arrays[name + "B.weight"], adapter.lora[1]["down_proj"].b)
    norm = "base_model.model.model.layers.0.post_attention_layernorm.weight"
    assert np.array_equal(arrays[norm], adapter.norms.post_attention[0])
    assert len(arrays) == 2 * (2 * 7 + 2)
    with safetensors.safe_open(tmp_path / "a" / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # as PEFT writes it


@pytest.mark.parametrize(("rank", "alpha"), [(4, 3), (3, 10), (32, 16), (8, 0.1), (8, 16.001), (4, 1e30)])
@pytest.mark.parametrize("use_rslora", [True, False])
def test_both_scalings_are_written_as_they_were(tmp_path, model, rank, alpha, use_rslora):
    adapter = init_adapter(jax.random.key(0), model, rank, alpha, use_rslora=use_rslora)
    divisor = rank**0.5 if use_rslora else rank
    assert adapter.lora[0]["q_proj"].scaling == pytest.approx(alpha / divisor, rel=1e-15)
    save_adapter(adapter, tmp_path / "a", "b")
    options = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (options["use_rslora"], options["r"]) == (use_rslora, rank)
    assert options["lora_alpha"] == (alpha if isinstance(alpha, int) else pytest.approx(alpha, rel=1e-15))
    assert_same(load_adapter(tmp_path / "a", model), adapter)


@pytest.mark.parametrize("use_rslora", [True, False])
def test_an_alpha_gives_its_scaling_back_to_the_last_bit(use_rslora):
    rng = np.random.default_rng(0)
    for rank, alpha in zip(rng.integers(1, 129, 2000).tolist(), rng.uniform(0, 200, 2000).tolist(), strict=True):
        for one in (alpha, round(alpha, 1), round(alpha) + 1):
            scaling = lora_scaling(rank, one, use_rslora)
            assert lora_scaling(rank, lora_alpha(rank, scaling, use_rslora), use_rslora) == scaling
    assert isinstance(lora_alpha(3, lora_scaling(3, 16, use_rslora), use_rslora), int)


def test_rank_stabilised_scaling_by_hand(tmp_path, model):
    save_adapter(tiny_adapter(model), tmp_path / "a", "b")
    edit_options(use_rslora=True, lora_alpha=3)(tmp_path / "a")
    assert load_adapter(tmp_path / "a", model).lora[0]["q_proj"].scaling == 3 / 2  # alpha 3, rank 4


def test_lower_precision_becomes_float32(tmp_path, model):
    adapter = tiny_adapter(model)
    save_adapter(adapter, tmp_path / "a", "b")
    path = tmp_path / "a" / "adapter_model.safetensors"
    half = {n: a.astype(jnp.bfloat16) for n, a in safetensors.numpy.load_file(path).items()}
    safetensors.numpy.save_file(half, path)
    expected = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), adapter)
    assert_same(load_adapter(tmp_path / "a", model), expected)


def test_double_precision_is_written_as_single(tmp_path, model):
    adapter = tiny_adapter(model)
    with jax.enable_x64(True):
        save_adapter(jax.tree.map(lambda a: a.astype(jnp.float64), adapter), tmp_path / "a", "b")
    assert_same(load_adapter(tmp_path / "a", model), adapter)


def test_trained_norms_on_demand(tmp_path, model):
    save_adapter(tiny_adapter(model), tmp_path / "plain", "b")
    adapter = load_adapter(tmp_path / "plain", model, train_norms=True)
    layer = model.base.layers[1]
    assert np.array_equal(adapter.norms.input[1], layer.input_norm) and isinstance(adapter.norms, TrainedNorms)
    jax.jit(lambda a: jax.tree.map(jnp.negative, a), donate_argnums=0)(adapter)
    assert not layer.input_norm.is_deleted()
    assert load_adapter(tmp_path / "plain", model, train_norms=False).norms is None
    save_adapter(tiny_adapter(model, train_norms=True), tmp_path / "norms", "b")
    with pytest.raises(
        UserError, match=r"has trained norm scales, but train_norms is false; set lora.train_norms=true"
    ):
        load_adapter(tmp_path / "norms", model, train_norms=False)


def test_what_cannot_be_written(tmp_path, model):
    adapter = tiny_adapter(model)
    other = tiny_adapter(model, target_modules=["q_proj"])
    with pytest.raises(
        ValueError, match=r"one list of modules; got \['down_proj'.* in layer 0 and \['q_proj'\] in layer 1"
    ):
        save_adapter(Adapter((adapter.lora[0], other.lora[1])), tmp_path / "a", "b")
    with pytest.raises(ValueError, match=r"got \['k_proj'\] in layer 0 and \['q_proj'\] in layer 1"):
        save_adapter(
            Adapter((tiny_adapter(model, target_modules=["k_proj"]).lora[0], other.lora[1])), tmp_path / "a", "b"
        )
    pair = adapter.lora[0]["q_proj"]
    scaled = {**adapter.lora[0], "q_proj": pair.replace(scaling=3.0)}
    with pytest.raises(ValueError, match="one rank, one scaling"):
        save_adapter(Adapter((scaled, adapter.lora[1])), tmp_path / "a", "b")
    (tmp_path / "notes").write_text("x")
    with pytest.raises(UserError, match="holds notes, which would be lost"):
        save_adapter(adapter, tmp_path, "b")


def as_pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_options(r=8), r"tensor .*lora_A.weight: expected shape .8, 64. by the configuration, found .4, 64."),
        (edit_options(r=0), "r is 0; expected a rank from 1 to 2147483647"),
        (edit_options(r=10**400, lora_alpha=16.0), r"r is 10{199}\.\.\.; expected a rank from 1 to 2147483647"),
        (edit_options(r=10**400, use_rslora=True), r"r is 10{199}\.\.\.; expected a rank from 1 to 2147483647"),
        (edit_options(r="4"), "r is '4'; expected a rank"),
        (edit_options(lora_alpha=None), "lora_alpha is None; expected a number"),
        (edit_options(lora_alpha=float("inf")), "lora_alpha is inf; expected a number"),
        (edit_options(target_modules=["q_proj"]), r"down_proj.lora_A.weight float32.4, 64. belongs to no part of"),
        (edit_options(target_modules=["q_prj"]), r"target_modules: 'q_prj' is not supported; .*did you mean 'q_proj'"),
        (
            edit_options(target_modules=["lm_head"]),
            "target_modules: 'lm_head' is not supported; allowed: q_proj, k_proj",
        ),
        (
            edit_options(target_modules=3),
            r"target_modules is 3; expected a pattern, or a list of q_proj",
        ),
        (edit_options(exclude_modules=["up_proj"]), r"up_proj.lora_A.weight float32.4, 32. belongs to no part of"),
        (
            edit_options(target_modules=".*", exclude_modules=["up_proj"]),
            r"up_proj.lora_A.weight float32.4, 32. belongs to no part of",
        ),
        (edit_options(exclude_modules=["1.mlp.up_proj"]), r"exclude_modules is .*; supported: .* all layers. PEFT can"),
        (edit_options(exclude_modules=".*up_proj"), r"exclude_modules is '.*up_proj'; supported: a list of names for"),
        (edit_options(peft_type="IA3"), "peft_type is 'IA3'; supported: 'LORA'"),
        (edit_options(task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'; supported: 'CAUSAL_LM', None"),
        (
            edit_options(auto_mapping={"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}),
            "auto_mapping: the adapter belongs to a LlamaForCausalLM, the model is a Qwen2ForCausalLM",
        ),
        (edit_options(bias="all"), "bias is 'all'; supported: 'none'"),
        (edit_options(init_lora_weights="pissa"), "init_lora_weights is 'pissa'; .* PEFT can merge such"),
        (edit_options(use_dora=True), r"option use_dora \(True\) is not supported. PEFT can merge such"),
        (edit_options(rank_pattern={"q_proj": 8}), r"option rank_pattern \({'q_proj': 8}\) is not supported"),
        (edit_options(alpha_pattern={"q_proj": 8}), "option alpha_pattern .* is not supported"),
        (edit_options(fan_in_fan_out=True), "option fan_in_fan_out .* is not supported"),
        (edit_options(layers_to_transform=[0]), r"option layers_to_transform \(\[0\]\) is not supported"),
        (edit_options(layers_to_transform=0), r"option layers_to_transform \(0\) is not supported"),
        (edit_options(lora_bias=True), "option lora_bias .* is not supported"),
        (edit_options(option_of_the_future=3), r"option option_of_the_future \(3\) is not supported"),
        (
            edit_options(modules_to_save=["lm_head"]),
            r"modules_to_save is \['lm_head'\]; supported: none, or input_layern",
        ),
        (edit_options(modules_to_save=["norm"]), r"modules_to_save is \['norm'\]"),
        (edit_options(modules_to_save=["input_layernorm"]), r"modules_to_save is \['input_layernorm'\]; supported: "),
        (
            edit_options(modules_to_save=["input_layernorm", "post_attention_layernorm"]),
            "layers.0.input_layernorm.weight is missing",
        ),
        (
            edit_options(base_model_name_or_path="org/other"),
            "base_model_name_or_path: expected some/base, found org/other",
        ),
        (edit_arrays(lambda a: a.pop(A)), f"tensor {A} is missing; expected float32.4, 32."),
        (edit_arrays(lambda a: a.update({A: a[A][:, :16].copy()})), f"{A}: expected shape .4, 32. .*found .4, 16."),
        (
            edit_arrays(lambda a: a.update({A: a[A].astype(np.int32)})),
            f"{A}: expected dtype float32 or .*, found int32",
        ),
        (
            edit_arrays(lambda a: a.update({A.replace("layers.1", "layers.2"): a[A]})),
            r"the adapter has 3 layers, the model \(Qwen2ForCausalLM, hidden_size 32\) has 2: it belongs to another",
        ),
        (
            edit_arrays(lambda a: [a.pop(name) for name in list(a) if "layers.1." in name]),
            r"the adapter has 1 layers, the model \(Qwen2ForCausalLM, hidden_size 32\) has 2: it belongs to another",
        ),
        (edit_arrays(lambda a: a[A].__setitem__((0, 3), np.nan)), f"{A} has numbers that are not finite"),
        (edit_arrays(lambda a: a[A].__setitem__((0, 3), np.inf)), f"{A} has numbers that are not finite"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json: not valid JSON"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing$"),
        (
            as_pickle,
            "adapter_model.safetensors is missing; adapter_model.bin is a pickle, which can run code and is never",
        ),
        (
            lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x80\x04\x95abcdefgh"),
            "looks like a PyTorch pickle",
        ),
    ],
)
def test_folder_that_does_not_fit(tmp_path, model, damage, message):
    folder = tmp_path / "adapter"
    save_adapter(tiny_adapter(model), folder, "some/base")
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_adapter(folder, model, base_name="some/base")


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dropout": 0.05},
        {"task_type": None},
        {"init_lora_weights": "gaussian"},
        {"revision": "main"},
        {"rank_pattern": {}, "use_dora": False, "layers_to_transform": None},
        {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}},
        {"base_model_name_or_path": "/elsewhere/base/"},
        {"ensure_weight_tying": True, "exclude_modules": ["lm_head"]},
        {"target_modules": [*PROJECTIONS, "lm_head", "query_key_value"]},
        {"target_modules": [f"mlp.{name}" if name in MLP else f"self_attn.{name}" for name in PROJECTIONS]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {"target_modules": "(.*.*)*Z"},  # not matched
        {"target_modules": ["up_proj", *reversed(PROJECTIONS)]},
    ],
    ids=str,
)
def test_options_that_change_nothing_are_accepted(tmp_path, model, options):
    adapter = tiny_adapter(model)
    save_adapter(adapter, tmp_path / "a", "some/base")
    edit_options(**options)(tmp_path / "a")
    assert open_adapter(tmp_path / "a").modules == PROJECTIONS
    assert_same(load_adapter(tmp_path / "a", model, base_name="some/base"), adapter)


def test_a_pattern_has_the_modules_of_the_weights(tmp_path, model):
    adapter = tiny_adapter(model, target_modules=["k_proj", "down_proj"])
    save_adapter(adapter, tmp_path / "a", "b")
    edit_options(target_modules=".*(k|down)_proj")(tmp_path / "a")
    assert_same(load_adapter(tmp_path / "a", model), adapter)
    edit_arrays(lambda a: a.pop("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"))(tmp_path / "a")
    with pytest.raises(UserError, match=r"layers.0.mlp.down_proj.lora_A.weight is missing"):
        load_adapter(tmp_path / "a", model)
    edit_arrays(lambda a: [a.pop(name) for name in list(a)])(tmp_path / "a")
    with pytest.raises(UserError, match=r"adapter_model.safetensors: has no LoRA pair of a projection; expected one"):
        load_adapter(tmp_path / "a", model)


def test_of_stacked_adapters_each_is_saved_alone(tmp_path, model):
    each = [tiny_adapter(model, seed, train_norms=True) for seed in (1, 2, 3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    with pytest.raises(ValueError, match=r"A is \[rank, inputs\], got \(3, 4, 64\)"):
        save_adapter(stacked, tmp_path / "a", "some/base")
    assert not (tmp_path / "a").exists()
    save_adapter(jax.tree.map(lambda leaf: leaf[1], stacked), tmp_path / "a", "some/base")
    assert_same(load_adapter(tmp_path / "a", model), each[1])


def test_adapter_of_another_network(tmp_path):
    model = load_model(ORACLES / "qwen2_tied", dtype="float32")
    save_adapter(tiny_adapter(tiny_model(weight_format="bf16")), tmp_path / "a", "b")  # same widths, another MLP
    with pytest.raises(UserError, match=r"down_proj.lora_A.weight: expected shape .4, 48. by .*, found .4, 64."):
        load_adapter(tmp_path / "a", model)
    with pytest.raises(UserError, match=r"k_proj.lora_B.weight: expected shape .32, 4. by .*, found .16, 4."):
        load_adapter(ORACLES / "qwen2_tied_adapter", load_model(ORACLES / "qwen3_sharded"))
    with pytest.raises(UserError, match="base_model_name_or_path: expected some/llama3, found qwen2_tied"):
        load_adapter(ORACLES / "qwen2_tied_adapter", load_model(ORACLES / "llama3"), base_name="some/llama3")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_adapter("nowhere", model)


def test_a_fingerprint_of_configuration_and_weights(tmp_path):
    found = []
    for alpha, weights in ((8, b"a"), (64, b"a"), (8, b"b")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        found.append(adapter_fingerprint(tmp_path))
    assert len(set(found)) == 3


def test_an_adapter_that_is_not_finite_replaces_none(tmp_path, model):
    good = tiny_adapter(model)
    save_adapter(good, tmp_path / "adapter", "base")
    with pytest.raises(UserError, match=r"lora_A\.weight has numbers that are not finite: .*nothing is written"):
        save_adapter(jax.tree.map(lambda x: x * jnp.nan, good), tmp_path / "adapter", "base")
    assert_same(load_adapter(tmp_path / "adapter", model), good)
    with pytest.raises(ValueError, match="the adapter has no LoRA pair"):
        save_adapter(good.replace(lora=()), tmp_path / "adapter", "base")


def test_norms_that_a_folder_lacks_are_of_the_kind_that_a_new_adapter_has(tmp_path):
    model = load_model("builtin:quickstart", dtype="float32")
    save_adapter(init_adapter(jax.random.key(0), model, 4, 8), tmp_path / "a", base_name="x")
    loaded = load_adapter(tmp_path / "a", model, train_norms=True)
    assert jax.tree.structure(loaded) == jax.tree.structure(
        init_adapter(jax.random.key(0), model, 4, 8, train_norms=True)
    )
