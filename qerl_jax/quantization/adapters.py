"""Adapters on a base whose channels AWQ has scaled.

AWQ divides a norm scale by s and multiplies the columns that read it by s, which the network does not see; an adapter
does. One that was trained on the plain model fits no scaled base, though every shape agrees.
"""

import logging
import os
from pathlib import Path

from qerl_jax.models.files import read_json
from qerl_jax.models.peft import adapter_folder
from qerl_jax.models.source import ADAPTER_CONFIG, resolve
from qerl_jax.quantization.report import REPORT

_log = logging.getLogger(__name__)


def warn_of_scaled_base(adapter: str | os.PathLike[str], base: str | os.PathLike[str]) -> None:
    """Says so where `base` is a folder that AWQ has made and the adapter names another base, by its last part.

    Of a folder without the report, as an export of one that AWQ has made, nothing is known.

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
            trained_on,
            base,
        )
