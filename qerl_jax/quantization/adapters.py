"""Adapters compared with the weights that they are to be used with, before those are read.

An adapter that was trained on weights rounded to a 4-bit format answers differently on plain ones, and the other way
round. AWQ divides a norm scale by s and multiplies the columns that read it by s: the network stays the same, but an
adapter reads other inputs. One that was trained on the plain model fits no scaled base, though every shape agrees.
"""

import logging
import os
from pathlib import Path

from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import read_json
from qerl_jax.models.loading import open_model
from qerl_jax.models.packed_by import rounded_to
from qerl_jax.models.peft import TRAINED_ON, adapter_folder, check_fit, open_adapter
from qerl_jax.models.source import ADAPTER_CONFIG, resolve
from qerl_jax.option_names import FORMATS
from qerl_jax.quantization.report import REPORT

_log = logging.getLogger(__name__)


def check_adapter(
    adapter: str | os.PathLike[str], base: str | os.PathLike[str], train_norms: bool | None = None
) -> None:
    """Refuses what `load_adapter` and `trained_format` would refuse; no weight of the base is read. For callers that
    load a large model before its adapter.

    Args:
      adapter, train_norms: as for `load_adapter`.
      base: as for `load_model`.

    Raises:
      UserError: there is no such adapter or base, the adapter's folder is malformed or uses what is not supported, or
        it is one of another network.
    """
    opened = open_adapter(adapter)
    trained_format(adapter)
    check_fit(opened, open_model(base).config, train_norms=train_norms)


def warn_of_scaled_base(adapter: str | os.PathLike[str], base: str | os.PathLike[str]) -> None:
    """Warns if `base` is a folder that AWQ has made and the adapter names another base, by the last part of its path.

    Of a folder without the report, such as an export of one that AWQ has made, nothing is known.

    Args:
      adapter: as for `load_adapter`.
      base: as for `load_model`.

    Raises:
      UserError: there is no such adapter or base.
    """
    folder = resolve(base)
    if not (folder / REPORT).is_file() or read_json(folder / REPORT).get("method") != "awq":
        return
    where = adapter_folder(adapter) / ADAPTER_CONFIG
    trained_on = str(read_json(where).get("base_model_name_or_path"))
    if Path(trained_on).name not in (Path(base).name, folder.resolve().name):
        _log.warning(
            "%s: the adapter was trained on %s, and AWQ has scaled the channels of %s: on it the adapter computes "
            "something else. Use it with its own base; or, if that is this folder under another name, correct "
            "base_model_name_or_path",
            where,
            shown(trained_on),
            base,
        )


def trained_format(adapter: str | os.PathLike[str]) -> str | None:
    """The format of the weights that an adapter was trained on; None where its folder does not say, as other programs'.

    Args:
      adapter: as for `load_adapter`.

    Raises:
      UserError: there is no such adapter, or it names no format.
    """
    where = adapter_folder(adapter) / TRAINED_ON
    if not where.is_file():
        return None
    found = read_json(where).get("weight_format")
    if found not in FORMATS:
        raise UserError(f"{where}: weight_format is {shown(repr(found))}; allowed: {', '.join(FORMATS)}")
    return str(found)


def warn_of_other_format(
    adapter: str | os.PathLike[str],
    base: str | os.PathLike[str],
    weight_format: str | None,
    option: str | None = "weight_format (--weight-format)",
) -> None:
    """Warns if the weights of `base`, loaded as `weight_format`, are rounded otherwise than those that the adapter was
    trained on.

    Args:
      adapter: as for `load_adapter`.
      base, weight_format: as for `load_model`.
      option: the name by which the caller's user gives a format; None where there is none.

    Raises:
      UserError: there is no such adapter or base, or the adapter's folder names no format.
    """
    trained, found = trained_format(adapter), rounded_to(base, weight_format)
    if trained in (None, found):
        return
    can_be = option is not None and rounded_to(base, None) == "bf16"
    _log.warning(
        "%s: the adapter was trained on %s weights, and those of %s are %s here: it answers otherwise; take %s",
        adapter_folder(adapter) / TRAINED_ON,
        trained,
        base,
        found,
        f"{base} with {option} {trained}" if can_be else "the run or the base that it was trained on",
    )
