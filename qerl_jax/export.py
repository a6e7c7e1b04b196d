"""What a run learned, or a model, as a folder for other programs.

    peft    the adapter: adapter_config.json and adapter_model.safetensors, and in qerl_adapter.json the format of the
            weights that it was trained on, where that is known
    bf16    base and adapter merged: a plain model in bfloat16, trained norms in float32
    nvfp4   the base alone, packed as compressed-tensors stores it; no adapter can be inside

Tokenizer, chat template and generation_config.json of the base go with each. Of a run that is not finished the newest
checkpoint is taken. A folder appears whole or not at all.
"""

import os

import jax.numpy as jnp

from qerl_jax import run_files
from qerl_jax.durable import where_it_leads
from qerl_jax.errors import UserError, nearest
from qerl_jax.models.fingerprint import fingerprint
from qerl_jax.models.loading import load_model, model_shapes
from qerl_jax.models.packed_by import rounded_to
from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.peft import load_adapter, save_adapter
from qerl_jax.models.saving import save_merged, save_model
from qerl_jax.models.source import from_anywhere, resolve
from qerl_jax.option_names import EXPORT_FORMATS, FORMATS
from qerl_jax.program import program
from qerl_jax.quantization.adapters import check_adapter, trained_format, warn_of_other_format, warn_of_scaled_base
from qerl_jax.run_or_model import Source, find_source


def export_model(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    format: str,
    adapter: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a run or a model as a folder of `format`.

    Args:
      source: a run folder (its base, weight format and adapter are used; of an unfinished run the newest checkpoint's),
        or a model as `load_model` takes it.
      path: the folder; one that holds such an export already is replaced.
      format: "peft", "bf16" or "nvfp4"; see the module.
      adapter: a PEFT folder; for a run, instead of its own.

    Raises:
      UserError: an unknown format, one that the base's weights are not in, an option that would have no effect, nothing
        to export, an adapter that cannot be used with the model, a model that is not the one trained on (of format
        "peft" its tokenizer and ids alone are compared), a config that says another one, or a `path` that holds other
        files.
    """
    if format not in EXPORT_FORMATS:
        hint = nearest(format, EXPORT_FORMATS, elsewhere=FORMATS)
        raise UserError(f"format is {format!r}; allowed: {', '.join(EXPORT_FORMATS)}{hint}")
    found = find_source(os.fspath(source), own_adapter=adapter is None)
    if adapter is not None:
        check_adapter(adapter, found.model)
        warn_of_scaled_base(adapter, found.model)
    base = resolve(found.model)
    made_from = [base, where_it_leads(source), *([] if adapter is None else [resolve(adapter, shipped=False)])]
    if where_it_leads(path).resolve() in [folder.resolve() for folder in made_from]:
        raise UserError(f"{path}: the export would replace what it is made from; choose another name")
    folder = where_it_leads(path)
    if folder.name == run_files.ADAPTER and run_files.is_run(folder.parent):
        raise UserError(f"{path}: there the run in {folder.parent} leaves what it has learned; choose another name")
    if format == "nvfp4":
        if adapter is not None:
            raise UserError(
                f"--adapter {os.fspath(adapter)} has no effect with nvfp4: 4-bit weights cannot hold an adapter. Leave "
                "it out, and serve the adapter beside the base (format peft), or merge both (format bf16)"
            )
        _refuse_other_formats(source, found, path)
        model = load_model(found.model, found.weight_format)
        if found.learned is not None:
            found.refuse_another_model(fingerprint(_as_trained(found, model)))
        save_model(model, path, tokenizer_from=found.model, weight_format="nvfp4")
    elif format == "peft":
        # No weight of the base is read, and none compared.
        found.refuse_another_model(None)
        trained = _adapter(found, adapter)
        if trained is None:
            raise UserError(f"{source}: a model alone has no adapter; expected a run folder, or --adapter DIR")
        trained_on = rounded_to(found.model, found.weight_format) if adapter is None else trained_format(adapter)
        base_name = from_anywhere(found.model)
        save_adapter(trained, path, base_name, tokenizer_from=found.model, weight_format=trained_on)
    else:
        trained = _adapter(found, adapter)
        if adapter is not None:
            warn_of_other_format(adapter, found.model, found.weight_format, option=None)
        model = load_model(found.model, found.weight_format, None if found.dtype == "auto" else found.dtype)
        if found.learned is not None:
            found.refuse_another_model(fingerprint(model))
        save_merged(model, trained, path, tokenizer_from=found.model, dtype=jnp.bfloat16)


def _refuse_other_formats(source: str | os.PathLike[str], found: Source, path: str | os.PathLike[str]) -> None:
    """Refuses a base that is not held in nvfp4, before it is loaded."""
    stored = rounded_to(found.model, None)
    held = found.weight_format or stored
    if held == "nvfp4":
        return
    packs = f"`{program()} quantize {found.model} {path}`" if stored == "bf16" else None
    if held == "bf16" and packs:
        raise UserError(f"{found.model}: its linear layers are plain, not nvfp4; {packs} packs them")
    others = "bf16" if found.learned is None else "peft (the adapter alone) or bf16 (base and adapter merged)"
    raise UserError(
        f"{source}: its base is held in {held}; allowed with --format nvfp4: nvfp4. Use --format {others}"
        f"{f'; or {packs}, which packs the base in nvfp4' if packs else ''}"
    )


def _as_trained(source: Source, model: Model) -> Model:
    """The model in the dtype that the run held it in."""
    if source.dtype in ("auto", model.base.embed.dtype.name):
        return model
    return load_model(source.model, source.weight_format, source.dtype)


def _adapter(source: Source, folder: str | os.PathLike[str] | None) -> Adapter | None:
    """The adapter to export: the one asked for, the run's, or none. No weight of the base is read for it."""
    return source.adapter() if folder is None else load_adapter(folder, model_shapes(source.model))
