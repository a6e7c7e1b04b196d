"""Ways to damage a model's or an adapter's folder; each gets a random generator and the folder, and says what it did.

Bytes of weights are not changed, but for block scales and global scales: any byte of a weight is a valid one, so the
formats cannot tell.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from folders import NVFP4, packed_arrays

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

Rng = np.random.Generator
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, 2**64, 10**400, -(10**30), 0.0, -2.5, 1.5, 1e308, math.inf,
    math.nan, "", "x", "32", "a\nb", "nul\0", "\ud800", "../" * 20, [], [1], [[]], {}, {"a": 1}, ["q_proj", {}],
]  # fmt: skip


def junk(rng: Rng) -> Any:
    return JUNK[rng.integers(len(JUNK))]


def pick(rng: Rng, items: Any) -> Any:
    items = list(items)
    return items[rng.integers(len(items))]


# ---- safetensors: the header, taken apart and put together again


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(path: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)


def weights_of(rng: Rng, folder: Path) -> Path:
    return pick(rng, sorted(folder.glob("*.safetensors")))


def entry(rng: Rng, header: dict[str, Any]) -> dict[str, Any]:
    return header[pick(rng, [name for name in header if name != "__metadata__"])]


def header_length(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    true = len(json.dumps(header))
    length = int(pick(rng, [0, 1, 7, true - 1, true + 1, true + 8, 100_000_001, 2**31, 2**32, 2**63, 2**64 - 1]))
    join(path, header, body, length)
    return f"length {length}"


def header_field(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    field = pick(rng, ["dtype", "shape", "data_offsets"])
    value = junk(rng)
    entry(rng, header)[field] = value
    join(path, header, body)
    return f"{field} = {value!r}"


def header_shape(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    found = entry(rng, header)
    shape = found["shape"]
    new = [
        [], [0], [0, 2**62], [0, 2**62, 2**62], shape[::-1] if shape[::-1] != shape else [1, *shape], [*shape, 1],
        [math.prod(shape)] if len(shape) > 1 else [1, *shape], [-1, -math.prod(shape)], [2**63, 2**63], [1] * 33,
        [float(n) for n in shape], [str(n) for n in shape], [n + 1 for n in shape], [2**64 // 2, *shape],
    ]  # fmt: skip
    found["shape"] = pick(rng, new)
    join(path, header, body)
    return f"shape {shape} -> {found['shape']}"


def header_offsets(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    found = entry(rng, header)
    begin, end = found["data_offsets"]
    other = entry(rng, header)["data_offsets"]
    if other == [begin, end]:
        other = [begin + 2, end + 2]
    new = [
        other, [begin, end + 1], [begin, end - 1], [begin + 2, end + 2], [end, begin], [-2, end], [begin], [0, 2**62],
        [begin, end, end], [begin + 0.0, end + 0.0], [str(begin), str(end)], [2**64, 2**64 + end - begin], None,
    ]  # fmt: skip
    found["data_offsets"] = pick(rng, [value for value in new if value != [begin, end]])
    join(path, header, body)
    return f"offsets {[begin, end]} -> {found['data_offsets']}"


def header_dtype(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    found = entry(rng, header)
    names = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "I8", "U16", "U8", "BOOL", "bf16"]
    # Bytes of a bfloat16 are valid as float16 too: nothing in the format tells them apart.
    found["dtype"] = pick(rng, [name for name in names if {name, found["dtype"]} - {"BF16", "F16"}] + ["F4", "BF16\n"])
    join(path, header, body)
    return f"dtype {found['dtype']}"


def header_names(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    name = pick(rng, [name for name in header if name != "__metadata__"])
    new = pick(
        rng, ["", "\0", "a\nb", "\x1b[2J", "ü" * 10_000, "\ud800", name.upper(), name + " ", "../" + name, "__x__"]
    )
    header[new] = header.pop(name) if rng.random() < 0.7 else dict(header[name])
    join(path, header, body)
    return f"name {name} -> {new[:20]!r}"


def header_text(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    header, body = split(path)
    text = json.dumps(header).encode()
    first = next(iter(json.dumps({name: value}) for name, value in header.items() if name != "__metadata__"))
    kinds: dict[str, bytes] = {
        "empty": b"",
        "null": b"null",
        "list": b"[" + text + b"]",
        "twice": text[:-1] + b"," + first.encode()[1:],
        "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "deep list": b"[" * 100_000,
        "deep entry": text[:-1] + b',"x":' + b"[" * 400 + b"]" * 400 + b"}",
        "nul": text.replace(b"model", b"mod\0l", 1),
        "utf-16": json.dumps(header).encode("utf-16"),
        "utf-32": json.dumps(header).encode("utf-32"),
        "latin": text.replace(b"model", b"m\xf6del", 1),
        "bom": b"\xef\xbb\xbf" + text,
        "spaces": text + b" " * int(rng.integers(1, 64)),
        "cut": text[: int(rng.integers(len(text)))],
        "trailing": text + b"{}",
        "digits": text.replace(b"[", b"[" + b"9" * 5000 + b",", 1),
        "metadata": json.dumps(
            {"__metadata__": {"more": "text"}} | {k: v for k, v in header.items() if k[0] != "_"}
        ).encode(),
        "bad metadata": json.dumps({**header, "__metadata__": junk(rng)}).encode(),
    }
    kind = pick(rng, kinds)
    join(path, kinds[kind], body)
    return kind


def flipped_bit(rng: Rng, folder: Path) -> str:
    path = weights_of(rng, folder)
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    place = int(rng.integers(8) if rng.random() < 0.2 else rng.integers(end))
    before = data[place]
    data[place] ^= 1 << int(rng.integers(8))
    # BF16 read as F16, as above; a renamed tensor is found, whatever its new name.
    path.write_bytes(data)
    return f"byte {place}: {before:#x} -> {data[place]:#x}"


def truncated(rng: Rng, folder: Path) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    places = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1, int(rng.integers(len(data)))]
    # JSON files may lose the white space at their end.
    length = min(max(int(pick(rng, places)), 0), len(data) - 1)
    path.write_bytes(data[:length])
    return f"{path.name} cut to {length} of {len(data)}"


def longer(rng: Rng, folder: Path) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    more = bytes(rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8))
    path.write_bytes(path.read_bytes() + more)
    return f"{path.name} + {more!r}"


def other_file(rng: Rng, folder: Path) -> str:
    path = pick(rng, sorted(folder.iterdir()))
    path.unlink()
    kind = pick(rng, ["gone", "folder", "pickle", "zip", "page", "zeros", "device", "dangling"])
    match kind:
        case "folder":
            path.mkdir()
        case "pickle":
            path.write_bytes(b"\x80\x04\x95\x10" + bytes(60))
        case "zip":
            path.write_bytes(b"PK\x03\x04" + bytes(60))
        case "page":
            path.write_bytes(b"<!doctype html><html></html>")
        case "zeros":
            with path.open("wb") as file:
                file.truncate(2**36)
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to(folder / "nothing")
    return f"{path.name}: {kind}"


# ---- JSON files


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def index_map(rng: Rng, folder: Path) -> str:
    new = pick(rng, [
        "../x.safetensors", "/etc/passwd", "/etc/x.safetensors", "pytorch_model.bin", "missing.safetensors", ".",
        "a/b.safetensors", "..\\x.safetensors", "\0.safetensors", "\ud800.safetensors", "x\n.safetensors",
        "x" * 5000 + ".safetensors", "model-00002-of-00003.SAFETENSORS", ".safetensors", *JUNK,
    ])  # fmt: skip
    path = folder / _INDEX
    name = pick(rng, json.loads(path.read_text())["weight_map"])
    edit(path, lambda values: values["weight_map"].update({name: new}))
    return f"{name} in {str(new)[:40]!r}"


def index_shape(rng: Rng, folder: Path) -> str:
    path = folder / _INDEX
    name = pick(rng, json.loads(path.read_text())["weight_map"])
    kind = pick(rng, ["junk", "whole", "less", "more", "swap", "no metadata"])

    def change(values: dict[str, Any]) -> None:
        table = values["weight_map"]
        match kind:
            case "junk":
                values["weight_map"] = junk(rng)
            case "whole":
                del values["weight_map"]
            case "less":
                del table[name]
            case "more":
                table[pick(rng, ["", "x", "a\nb", "\ud800", name + "2"])] = table[name]
            case "swap":
                table[name] = next(shard for shard in table.values() if shard != table[name])
            case "no metadata":
                values["metadata"] = junk(rng)

    edit(path, change)
    return f"{kind} {name}"


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip


def config_size(rng: Rng, folder: Path) -> str:
    key = pick(rng, _SIZES)
    right = json.loads((folder / "config.json").read_text())[key]
    # Four heads and two are read alike from the same matrices if their sizes agree: head_dim follows from the heads.
    values = [value for value in [*JUNK, right + 1, right * 16, right * 10**6, 10**9, 10**15] if value != right]
    value = pick(rng, values)
    edit(folder / "config.json", lambda hf: hf.update({key: value}))
    return f"{key} = {value!r}"


def config_missing(rng: Rng, folder: Path) -> str:
    key = pick(rng, ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "model_type", "tie_word_embeddings"])  # fmt: skip
    edit(folder / "config.json", lambda hf: hf.pop(key))
    return f"no {key}"


def config_value(rng: Rng, folder: Path) -> str:
    bad: list[Any] = [0, -1, "x", [], [1], {"a": 1}, True, math.nan, math.inf, -0.5, 10**400, 2**64, "1e-6"]
    menu: dict[str, list[Any]] = {
        "model_type": [*JUNK, "mamba", "gpt2", "qwen2_moe", "Qwen2", "llama4"],
        "rms_norm_eps": bad,
        "max_position_embeddings": [*bad, 0.5, 64.0],
        "tie_word_embeddings": [0, 1, "true", [], {}, 0.0],
        "head_dim": [7, 4, 16, 10**9, 10**400, *bad],
        "rope_scaling": [{"rope_type": kind} for kind in ("dynamic", "longrope", "x", 3, [], "a\nb")] + [3, "x", [1]],
        "rope_parameters": [{"rope_type": kind, "rope_theta": 1000.0} for kind in ("dynamic", "longrope", "x", {}, 7)]
        + [{"rope_type": "default", "rope_theta": theta} for theta in bad]
        + [3, "x", [1]],
        "hidden_act": ["gelu", 3, [], {}, "relu", "a\nb"],
        "use_sliding_window": ["yes", 3, [1]],
        "quantization_config": [3, "x", [1], {}, {"quant_method": "gptq"}, {"quant_method": []},
                                {"quant_method": "x\ny"}, NVFP4 | {"config_groups": junk(rng)},
                                NVFP4 | {"ignore": junk(rng)},
                                NVFP4 | {"format": junk(rng)}, NVFP4 | {"kv_cache_scheme": {"num_bits": 4}}],
    }  # fmt: skip
    key = pick(rng, menu)
    value = pick(rng, menu[key])
    edit(folder / "config.json", lambda hf: hf.update({key: value}))
    return f"{key} = {value!r}"


def config_text(rng: Rng, folder: Path) -> str:
    path = folder / pick(rng, sorted(p.name for p in folder.glob("*.json")))
    text = path.read_bytes()
    kinds: dict[str, bytes] = {
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "twice": text[:-1] + b',"hidden_size":64,"hidden_size":32,"r":2,"r":3}',
        "deep": b'{"a":' * 100_000,
        "deep value": text[:-1] + b',"model_type":' + b"[" * 400 + b"]" * 400 + b"}",
        "utf-16": text.decode().encode("utf-16"),
        "latin": text[:-1] + b',"n":"\xf6"}',
        "digits": text[:-1] + b',"n":' + b"9" * 5000 + b"}",
        "more": text[:-1] + b',"harmless_note":"x"}',
        "spaces": b" \n" + text + b"\n\n",
    }
    kind = pick(rng, kinds)
    # An adapter refuses options that it does not know, model configurations are full of them.
    path.write_bytes(kinds[kind])
    return f"{path.name}: {kind}"


# ---- tensors themselves


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    import safetensors.numpy

    arrays = packed_arrays()
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / _WEIGHTS, {"format": "pt"})


def patch(folder: Path, name: str, place: int, new: bytes) -> None:
    """Overwrites bytes of a stored tensor."""
    header, body = split(folder / _WEIGHTS)
    begin = header[name]["data_offsets"][0] + place
    join(folder / _WEIGHTS, header, body[:begin] + new + body[begin + len(new) :])


def stored_names(folder: Path, *endings: str) -> list[str]:
    return [name for name in split(folder / _WEIGHTS)[0] if name.endswith(endings)]


def scale_byte(rng: Rng, folder: Path) -> str:
    value = int(pick(rng, [0x7F, 0xFF, 0x80, 0x81, 0xB8, 0xFE, int(rng.integers(0x7F, 0x100))]))
    name = pick(rng, stored_names(folder, "weight_scale"))
    size = math.prod(split(folder / _WEIGHTS)[0][name]["shape"])
    patch(folder, name, int(rng.integers(size)), bytes([value]))
    return f"scale byte {value:#x}"


def whole_scale(rng: Rng, folder: Path) -> str:
    value = float(pick(rng, [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan, -1e-45]))
    patch(folder, pick(rng, stored_names(folder, "global_scale", "scale_2")), 0, np.float32(value).tobytes())
    return f"global scale {value}"


def modelopt_option(rng: Rng, folder: Path) -> str:
    menu: dict[str, list[Any]] = {
        "quant_algo": [*JUNK, "FP8", "NVFP4_AWQ", "W4A8_AWQ", "nvfp4"],
        "group_size": [value for value in JUNK if value is not None] + [32],
        "kv_cache_quant_algo": ["INT8", 3, [], {}, "a\nb"],
        "kv_cache_scheme": ["INT8", 3, [], {}, "a\nb", {"num_bits": 4}],
        "exclude_modules": [3, "lm_head", {"a": 1}, [3], [[]], [None], ["*"], ["*proj"], ["(((" * 9, "model*"]],
    }
    key = pick(rng, menu)
    value = pick(rng, menu[key])
    (folder / "config.json").write_text(json.dumps(_plain_config(folder)))
    edit(folder / "hf_quant_config.json", lambda values: values["quantization"].update({key: value}))
    return f"{key} = {value!r}"


def _plain_config(folder: Path) -> dict[str, Any]:
    """config.json without what repeats hf_quant_config.json."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    return values


def ignored_modules(rng: Rng, folder: Path) -> str:
    value = pick(rng, [
        ["re:("], ["re:[", "lm_head"], ["re:.*"], ["re:(a+)+$"], ["re:(.*)*x"], ["re:" + "(" * 300], ["re:\\"], ["\0"],
        [""], ["re:"], ["re:(?P<a>x)(?P<a>y)"], ["re:(?<=a+)b"], ["re:.*q_proj"], ["re:" + ".*" * 9 + "x"],
        ["lm_head", "model.layers.0.self_attn.q_proj"], [3], [None], "lm_head", 3,
        {"a": 1}, [["lm_head"]], ["Linear"], ["re:x{99999999999}"],
    ])  # fmt: skip
    edit(folder / "config.json", lambda hf: hf["quantization_config"].update({"ignore": value}))
    return f"ignore = {str(value)[:60]!r}"


def tensor_shape(rng: Rng, folder: Path) -> str:
    kind = pick(rng, ["gone", "extra", "transposed", "short", "wide", "int8", "float64", "scalar"])

    def change(arrays: dict[str, np.ndarray]) -> None:
        name = pick(rng, [name for name in arrays if arrays[name].ndim == 2 and len(set(arrays[name].shape)) > 1])
        array = arrays[name]
        new = {
            "transposed": lambda: array.T.copy(),
            "short": lambda: array[:-1].copy(),
            "wide": lambda: np.concatenate([array, array], 1),
            "int8": lambda: array.view(np.int8),
            "float64": lambda: array.astype(np.float64),
            "scalar": lambda: np.zeros((), array.dtype),
        }
        if kind == "gone":
            del arrays[name]
        elif kind == "extra":
            arrays[name + pick(rng, ["2", "\n", ".bias"])] = array
        else:
            arrays[name] = new[kind]()

    rewrite(folder, change)
    return kind


def adapter_option(rng: Rng, folder: Path) -> str:
    menu: dict[str, list[Any]] = {
        "r": [0, -1, 3, 16, 10**9, 10**400, "4", None, [4], 4.0, True],
        "lora_alpha": ["8", None, [], math.nan, math.inf, True, {}, 10**400],
        "target_modules": [[], "all-linear", None, ["q_proj", "x"], ["lm_head"], [["q_proj"]], [{}], 3, {"q_proj": 1},
                           ["a\nb"], ["q_proj"], ["up_proj", "lm_head"], "(a+)+$", "\n", ["0.mlp.down_proj"]],
        "exclude_modules": [["q_proj"], ["0.mlp.down_proj"], ".*", 3, [3], {"a": 1}, ["lm_head"]],
        "modules_to_save": [["lm_head"], "input_layernorm", ["input_layernorm"], 3, [[]], {"a": 1}],
        "use_rslora": ["false", 3, [1]],
        "use_dora": [True, 1],
        "bias": ["all", 3, [], None],
        "peft_type": ["IA3", None, [], 3],
        "task_type": ["SEQ_CLS", [], 3],
        "fan_in_fan_out": [True, "x"],
        "rank_pattern": [{"q_proj": 2}, [1]],
        "alpha_pattern": [{"q_proj": 2}, "x"],
        "layers_to_transform": [[0], 3],
        "init_lora_weights": ["pissa", [], {}],
        "unknown\noption": [1],
    }  # fmt: skip
    key = pick(rng, menu)
    value = pick(rng, menu[key])
    edit(folder / "adapter_config.json", lambda options: options.update({key: value}))
    return f"{key!r} = {str(value)[:40]!r}"


_FILES = (header_length, header_field, header_shape, header_offsets, header_dtype, header_names, header_text,
          flipped_bit, truncated, longer, other_file, config_text)  # fmt: skip
_CONFIG = (config_size, config_missing, config_value)
MUTATIONS = {
    "plain": (*_FILES, *_CONFIG),
    "sharded": (*_FILES, index_map, index_map, index_shape, index_shape),
    "packed": (*_FILES, scale_byte, whole_scale, tensor_shape, ignored_modules, *_CONFIG),
    "modelopt": (scale_byte, whole_scale, modelopt_option, modelopt_option, truncated, header_shape, config_size),
    "adapter": (*_FILES, adapter_option, adapter_option, adapter_option),
}
