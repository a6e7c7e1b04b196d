"""The kernels of one decode step, read off the compiled program: what runs, what is copied, how much memory it needs.

    python -m benchmarks.decode_program --model qwen2.5-7b --batch 8 --lora-rank 32 --output decode_program.json

No GPU is needed: XLA compiles for an H200 ahead of time (`pip install .[cuda]` brings the compiler; on a machine
without a driver set JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1). --compute-capability 80 is for what an
A100 would run (with `pip install .[triton]`). Autotuning is off there, so that which tiles a matmul takes may differ
from a real run; which kernels there are does not. Programs of two and of three layers are compiled, whose difference is
a layer, and with --whole the one of all layers. With --queued the loop is that of slots that are filled again. `code`
tells of each Mosaic kernel of two layers its registers, the bytes that ptxas spilled (stored and loaded), and how many
PTX instructions it has; with nvdisasm beside ptxas (`pip install nvidia-cuda-nvdisasm`) also how many instructions of
the GPU, and how many of them are the copies that `ptx_memory.per_lane` is there to prevent, which must be none.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.report import versions, write_text
from benchmarks.shapes import MODELS, random_model
from pallas_kernels import compiling_for
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_adapter
from qerl_jax.models.params import norms_of
from qerl_jax.rollout import Prompts, SamplingSettings, generate
from qerl_jax.rollout.prepared import made, prepared
from qerl_jax.rollout.queued import Queue, decode_queue, empty_slots

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
_LOG_STEPS = 256
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}


class Kernel(NamedTuple):
    """One launch: the instruction's opcode, what of the model's code it is, and the bytes that it writes."""

    opcode: str
    name: str
    nbytes: int


def loop_turn(hlo: str) -> list[Kernel]:
    """The launches of one turn of the program's longest while loop, in order: the body's, then the condition's."""
    loops = re.findall(r"\bcondition=%([\w.\-]+), body=%([\w.\-]+)", hlo)
    turns = ([*computation(hlo, body), *computation(hlo, condition)] for condition, body in loops)
    return max((list(map(_kernel, filter(_launches, turn))) for turn in turns), key=len)


def computation(hlo: str, name: str) -> list[str]:
    """The instructions of a computation of an HLO module's text."""
    found = re.search(rf"^(?:ENTRY )?%{re.escape(name)} \(.*?^\}}", hlo, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return [line.strip().removeprefix("ROOT ") for line in found.group().splitlines()[1:-1]]


def _split(line: str) -> tuple[str, str]:
    """The type and the opcode of an instruction."""
    rest = line.split(" = ", 1)[1]
    if rest.startswith("("):
        end = next(i for i in range(len(rest)) if rest[: i + 1].count("(") == rest[: i + 1].count(")"))
        kind, rest = rest[: end + 1], rest[end + 1 :].strip()
    else:
        kind, rest = rest.split(" ", 1)
    return kind, rest.split("(", 1)[0]


def _launches(line: str) -> bool:
    return " = " in line and _split(line)[1] not in _NO_KERNEL


def _kernel(line: str) -> Kernel:
    kind, opcode = _split(line)
    place = re.search(r'op_name="([^"]*)"', line)
    steps = place.group(1).removeprefix("jit(<lambda>)/").split("/") if place else ["?"]
    name = steps[-2] if steps[-1] == "mpmd_map" else steps[-1]
    nbytes = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", kind):
        size = _SIZES[dtype]
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        nbytes += size
    return Kernel(opcode, name, nbytes)


def code_of(folder: Path) -> list[dict[str, Any]]:
    """What Mosaic's dumps in a folder say of each kernel, in the order in which they were compiled."""
    found = []
    for path in sorted(folder.glob("*.ptxas"), key=lambda path: path.stat().st_mtime):
        told, ptx = path.read_text(), path.with_suffix(".ptx").read_text()
        stored, loaded = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)[-1]
        kernel = {
            "kernel": path.stem.rsplit("_", 1)[0],
            "registers": int(re.findall(r"Used (\d+) registers", told)[-1]),
            "spilled_bytes": [int(stored), int(loaded)],
            "ptx_instructions": len(re.findall(r"^\s*[@a-z][^\n]*;$", ptx, re.MULTILINE)),
        }
        assembly = path.with_suffix(".sass_ctrl")
        if assembly.exists():
            sass = assembly.read_text()
            kernel["sass_instructions"] = len(re.findall(r"/\*[0-9a-f]{4,}\*/", sass))
            kernel["illegal_copies"] = len(re.findall(r"LDGSTS\S* \[[^]]*\+UR", sass))
        found.append(kernel)
    return found


def traced(
    config: ModelConfig, batch: int, rank: int, prompt: int, new: int, queued: bool, capability: int, place: Any
) -> jax.stages.Traced:
    """The rollout of `batch` completions of one prompt, for a device of this compute capability, where its arrays lie
    as `place` says; or, `queued`, a chunk of steps of as many slots that take samples from a queue."""
    settings = SamplingSettings(new, (config.vocab_size - 1,), 0)

    def run(model: Any, adapter: Any, prompts: Any, key: jax.Array) -> Any:
        return generate(model, adapter, prompts, key, settings, batch)

    def run_queued(model: Any, adapter: Any, key: jax.Array, slots: Any, queue: Any) -> Any:
        model, adapter = prepared(model, adapter, made(model, adapter))
        norms = norms_of(model, adapter)
        return decode_queue(slots, queue, key, model, adapter, norms, queue.count, 1, settings, _LOG_STEPS)

    def on_target(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    model = jax.eval_shape(lambda: random_model(config, jnp.dtype(jnp.bfloat16), kernels=True))
    adapter = jax.eval_shape(lambda: init_adapter(jax.random.key(0), model, rank, 2.0 * rank)) if rank else None
    key = jax.eval_shape(jax.random.key, 0)
    prompts = Prompts(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, prompt), (1,), (1,))))
    program: Any = jax.jit(run)
    operands = model, adapter, prompts, key
    with compiling_for(capability):
        if queued:
            sizes = {"rows": batch, "max_prompt_length": prompt, "slots": batch, "used": batch}
            slots = jax.eval_shape(lambda model, key: empty_slots(model, settings, key, **sizes), model, key)
            queue = Queue(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(4 * batch,)] * 5 + [()]))
            program, operands = jax.jit(run_queued, donate_argnames="slots"), (model, adapter, key, slots, queue)
        return program.trace(*map(on_target, operands))


def compiled(config: ModelConfig, batch: int, rank: int, prompt: int, new: int, queued: bool, capability: int) -> Any:
    """The program `traced`, compiled for an H200, or one that had another compute capability."""
    device = H200 if capability == 90 else H200.replace(_HOPPER, f"major: {capability // 10} minor: {capability % 10}")
    try:
        target = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=device, topology="1x1x1")
    except NotImplementedError as error:
        raise SystemExit(f"no compiler for NVIDIA GPUs here ({error}); `pip install .[cuda]` brings it") from error
    place = SingleDeviceSharding(target.devices[0])
    program = traced(config, batch, rank, prompt, new, queued, capability, place)
    return program.lower().compile(compiler_options={"xla_gpu_autotune_level": "0"})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result row."""
    config = MODELS[arguments.model]
    shape = arguments.batch, arguments.lora_rank, arguments.prompt, arguments.new, arguments.queued
    shape = *shape, arguments.compute_capability
    steps, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:  # apart: dumps take time, which `seconds` are not about
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        compiled(dataclasses.replace(config, num_hidden_layers=2), *shape)
        del os.environ["MOSAIC_GPU_DUMP_TO"]
        code = code_of(Path(folder))
    for layers in (2, 3):
        shallow = dataclasses.replace(config, num_hidden_layers=layers)
        began = time.perf_counter()
        program = compiled(shallow, *shape)
        seconds.append(round(time.perf_counter() - began, 1))
        steps.append(loop_turn(program.as_text()))
    counts = [collections.Counter(kernel.name for kernel in step) for step in steps]
    layer = counts[1] - counts[0]
    copies = [kernel for kernel in steps[1] if kernel.opcode.startswith("copy")]
    whole = None
    if arguments.whole:
        began = time.perf_counter()
        program = compiled(config, *shape)
        seconds.append(round(time.perf_counter() - began, 1))
        step = loop_turn(program.as_text())
        copies += [kernel for kernel in step if kernel.opcode.startswith("copy")]
        whole = len(step)
    rest = counts[0] - collections.Counter({name: 2 * count for name, count in layer.items()})
    return {
        "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
        "target": f"NVIDIA H200 (sm_{arguments.compute_capability}), compiled ahead of time, without autotuning",
        "versions": versions("jax", "jaxlib", "jax-cuda13-plugin"),
        "kernels_a_layer": layer.total(),
        "kernels_beside_layers": rest.total(),
        "kernels_a_step": whole or layer.total() * config.num_hidden_layers + rest.total(),
        "a_layer": dict(layer),
        "code": code,
        "beside_layers": dict(rest),
        "copies": [kernel._asdict() for kernel in copies],
        "temporary_mb": round(program.memory_analysis().temp_size_in_bytes / 1e6, 1),
        "compile_seconds_of_2_3_and_all_layers": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--batch", type=int, default=8, help="completions that decode at once")
    parser.add_argument("--lora-rank", type=int, default=32, help="0: no adapter")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--queued", action="store_true", help="slots that are filled again")
    parser.add_argument("--compute-capability", type=int, default=90, metavar="80", help="that of a GPU but Hopper's")
    parser.add_argument("--whole", action="store_true", help="compile all layers too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments), indent=1, default=str)
    print(text)
    if arguments.output is not None:
        write_text(arguments.output, text + "\n")


if __name__ == "__main__":
    main()
