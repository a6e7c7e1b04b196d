"""A model's folder quantized into another one, layer by layer.

    read layer -> what its projections read -> quantize -> file in the work folder -> run the layer on all activations

At no time is more than one layer of the plain model in memory, and one layer's activations. What the next layer reads
comes from the quantized layer, so that every layer is calibrated on what it will get. (AWQ's authors and llm-compressor
hand on the plain layer's activations; there the errors of earlier layers come as a surprise.) The held-out rows go
through the network plain, rounded to nearest and by the method, for the figures before and after.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import qerl_jax
from qerl_jax.durable import where_it_leads, whole_folder
from qerl_jax.errors import UserError, nearest
from qerl_jax.live_line import duration
from qerl_jax.models.compressed_tensors import quantization_config
from qerl_jax.models.loading import EMBED, Opened, open_model
from qerl_jax.models.params import Layer
from qerl_jax.models.shards import Stored, write_shards
from qerl_jax.models.source import CONFIG, copy_companions, write_json
from qerl_jax.models.tokenizer import load_tokenizer
from qerl_jax.option_names import FORMATS
from qerl_jax.quantization.calibration import ARITHMETIC, Calibration, load_calibration
from qerl_jax.quantization.layers import computed, ends_of, from_tensors, read_layer, to_tensors
from qerl_jax.quantization.methods import HELD_OUT, METHODS, SEARCHED, quantize_one, round_to_nearest
from qerl_jax.quantization.observation import Seen
from qerl_jax.quantization.report import REPORT, mean_errors, progress
from qerl_jax.quantization.streams import Stream
from qerl_jax.quantization.work import WorkFolder, alone, work_folders

_FORMATS = ("nvfp4",)
_OWN_TEXT = {"builtin:quickstart": ARITHMETIC}  # what a shipped policy is calibrated on when nothing else is named
_TOKENS_PER_BATCH = {"cpu": 4096}
_LAYERS = "model.layers."


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    weight_format: str = "nvfp4",
    method: str = "rtn",
    calibration: str | None = None,
    sequences: int | None = None,
    length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Quantizes the linear layers of a model into a new folder, which appears whole or not at all.

    A folder that is not finished is continued by the same call: finished layers lie in a work folder beside it, and the
    result is the same, byte for byte.

    Args:
      source: a model with plain weights: folder, hub name or `builtin:NAME`.
      destination: the folder to appear, with weights as compressed-tensors stores them, the source's tokenizer files,
        and the report.
      weight_format: "nvfp4".
      method: "rtn" rounds to nearest, as `load_model` does; "awq" searches scales on the calibration text first.
      calibration: text to calibrate and measure on (see `calibration`); with "rtn" it is only measured on.
      sequences, length: rows of it to take, and most tokens of a row; None as `load_calibration` says.
      chat_template_kwargs: variables of the chat template, which messages of it pass.
      say: gets a line of text for each layer.

    Returns:
      The report, which is also written into the folder.

    Raises:
      UserError: an option, file or tensor that cannot be used; names it, what was found and what is allowed.
    """
    _check_options(weight_format, method)
    calibrated = METHODS[method].calibrated
    text = calibration
    if text is None and calibrated:
        text = _OWN_TEXT.get(os.fspath(source))
    if text is None and calibrated:
        raise UserError(
            f"--method {method} needs --calibration: a .jsonl or .ndjson file with `text`, `messages` or `prompt` in "
            "its rows"
        )
    if text is None and (sequences, length, chat_template_kwargs) != (None, None, None):
        raise UserError(
            "--sequences, --length and --chat-template-kwargs have no effect without --calibration; leave them out"
        )
    target = where_it_leads(destination)
    _refuse_existing(target)
    opened = open_model(source)
    if opened.packing is not None:
        raise UserError(f"{opened.folder}: its weights are quantized already; expected plain ones")
    rows = None
    if text is not None:
        tokenizer = load_tokenizer(opened.folder, opened.config.vocab_size)
        rows = load_calibration(text, tokenizer, sequences, length, opened.config.positions, chat_template_kwargs)
    dtype = _compute_dtype(opened)
    settings = {
        "qerl_jax": qerl_jax.__version__,
        "source": str(opened.folder.resolve()),
        "files": _identity(opened),
        "format": weight_format,
        "method": method,
        "calibration": None if rows is None else rows.description,
        "computed_in": dtype.name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    report: dict[str, Any] = {key: value for key, value in settings.items() if key != "files"}
    with alone(target):
        _refuse_existing(target)  # by now
        work = WorkFolder(target, settings)
        for other in work_folders(target):
            if other != work.path:
                say(f"{other} is left from a command with other settings; remove it if that is not to be continued")
        report |= _layers(_job(opened, method, rows, dtype, work), say)
        if _identity(opened) != settings["files"]:
            raise UserError(f"{opened.folder}: its files have changed meanwhile; run the command again")
        _assemble(opened, work, target, report)
        work.remove()
    return report


def _refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        left = "".join(f"; {path} is what an interrupted command left" for path in work_folders(target))
        raise UserError(f"{target} is there already; remove it or choose another name{left}")


def _check_options(weight_format: str, method: str) -> None:
    if weight_format not in _FORMATS:
        hint = nearest(weight_format, _FORMATS, elsewhere=FORMATS)
        raise UserError(
            f"--format is {weight_format!r}; allowed: {', '.join(_FORMATS)}{hint}. Other 4-bit formats are not "
            "written: load_model quantizes to them"
        )
    if method not in METHODS:
        raise UserError(f"--method is {method!r}; allowed: {', '.join(METHODS)}{nearest(method, METHODS)}")


def _compute_dtype(opened: Opened) -> jnp.dtype:
    """What activations are computed in: bfloat16 off a CPU where the model is stored in it, or else float32."""
    stored = opened.tensors[EMBED][1].dtype
    return jnp.dtype(jnp.bfloat16 if stored == jnp.bfloat16 and jax.default_backend() != "cpu" else jnp.float32)


def _identity(opened: Opened) -> dict[str, list[int]]:
    """Sizes and times of change of the source's files, to tell whether unfinished work was begun with the same ones."""
    files = sorted({file for file, _ in opened.tensors.values()} | {opened.folder / CONFIG})
    return {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files}


class _Job(NamedTuple):
    """What stays the same from layer to layer, and the streams that move on: `plain`, held-out text through the plain
    network; `rounded`, the same through quantized ones, by method; and `search`, calibration text, if the method is
    calibrated. Without text there are none."""

    opened: Opened
    method: str
    dtype: jnp.dtype
    work: WorkFolder
    plain: Stream | None
    rounded: dict[str, Stream]
    search: Stream | None


def _job(opened: Opened, method: str, rows: Calibration | None, dtype: jnp.dtype, work: WorkFolder) -> _Job:
    if rows is None:
        return _Job(opened, method, dtype, work, None, {}, None)
    batch = _TOKENS_PER_BATCH.get(jax.default_backend(), 16384)
    ends = ends_of(opened, dtype)
    plain = Stream(ends, rows.held_out, batch)
    rounded = {name: plain.copy() for name in dict.fromkeys(("rtn", method))}
    search = Stream(ends, rows.search, batch) if METHODS[method].calibrated else None
    return _Job(opened, method, dtype, work, plain, rounded, search)


def _layers(job: _Job, say: Callable[[str], None]) -> dict[str, Any]:
    """Quantizes the layers that the work folder lacks; returns the report's part about layers and text."""
    count = job.opened.config.num_hidden_layers
    layers: list[dict[str, Any]] = []
    began = time.monotonic()
    for i in range(count):
        layers.append({"layer": i} | _layer(job, i))
        left = (time.monotonic() - began) / (i + 1) * (count - i - 1)
        say(f"layer {i + 1}/{count}  {progress(layers[-1])}  {duration(left)} left")
    result: dict[str, Any] = {"mean": mean_errors(layers), "layers": layers}
    if job.plain is not None:
        figures = {"plain": job.plain.figures()} | {name: stream.figures() for name, stream in job.rounded.items()}
        result["text"] = {name: row._asdict() for name, row in figures.items()}
    return result


def _layer(job: _Job, i: int) -> dict[str, Any]:
    """Quantizes layer i unless the work folder has it, and moves the streams past it; returns its part of the report.
    Whatever it holds of the layer is gone when it returns."""
    kept = job.work.report(i)
    if kept is not None and job.plain is None:
        return kept
    layer = read_layer(job.opened, i)
    if kept is None:
        kept = _quantized(job, i, layer)
    if job.plain is None:
        return kept
    job.plain.advance(computed(layer, job.dtype))
    if job.method != "rtn":
        job.rounded["rtn"].advance(computed(round_to_nearest(layer), job.dtype))
    del layer
    packed = computed(from_tensors(job.work.tensors(i), i, job.work.path), job.dtype)
    job.rounded[job.method].advance(packed)
    if job.search is not None:
        job.search.advance(packed)
    return kept | {"stream_error_held_out": {name: x.distance(job.plain) for name, x in job.rounded.items()}}


def _quantized(job: _Job, i: int, layer: Layer) -> dict[str, Any]:
    """Quantizes layer i into the work folder; returns its part of the report."""
    seen: dict[str, dict[str, Seen]] = {}
    if job.plain is not None:
        clean = computed(layer, job.dtype)
        streams = {SEARCHED: job.search, HELD_OUT: job.plain}
        seen = {text: stream.observe(clean) for text, stream in streams.items() if stream is not None}
        del clean
    _check_finite(job.opened, i, seen)
    packed, report = quantize_one(job.method, job.opened.config, layer, seen)
    job.work.write(i, to_tensors(packed, i), report)
    return report


def _check_finite(opened: Opened, layer: int, seen: Mapping[str, Mapping[str, Seen]]) -> None:
    for text, groups in seen.items():
        for group, sums in groups.items():
            if not np.isfinite(np.asarray(sums.magnitude)).all():
                raise UserError(f"{opened.folder}: layer {layer}: {group} reads NaN or infinity on the {text} text")


def _assemble(opened: Opened, work: WorkFolder, target: Path, report: dict[str, Any]) -> None:
    """Writes the folder from the layers' files and what the source has beside them."""
    own = {name: array for name, (_, array) in opened.tensors.items() if not name.startswith(_LAYERS)}
    for i in range(opened.config.num_hidden_layers):
        own |= work.tensors(i)

    def stored(array: np.ndarray) -> Stored:
        return Stored(jax.ShapeDtypeStruct(array.shape, array.dtype), lambda: array)

    hf = opened.hf | {"quantization_config": quantization_config()}
    with whole_folder(target, []) as folder:
        write_json(folder / CONFIG, hf)
        write_shards(folder, {name: stored(array) for name, array in own.items()})
        write_json(folder / REPORT, report)
        copy_companions(opened.folder, folder)
