"""Rehearsals that a machine has recorded, for the pages: a build of torch without CUDA cannot rehearse.

With REFIMPL_RECORD=1 in the environment, `rehearse_or_read` writes what it rehearses to data/rehearsals.json. Nobody
else writes there.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rehearsing import CannotRehearse, rehearse

if TYPE_CHECKING:
    from os import PathLike

RECORDS = Path(__file__).resolve().parents[2] / "data" / "rehearsals.json"


def rehearse_or_read(script: "str | PathLike[str]", **options: Any) -> dict[str, Any]:
    """Return what `rehearse(script, **options)` does; or, where there can be no device, what was recorded of a script
    with the same text and options. "recorded" says which it is. CannotRehearse if it is neither."""
    key = hashlib.sha256(json.dumps([Path(script).read_text(), options], sort_keys=True).encode()).hexdigest()[:16]
    try:
        found = rehearse(script, **options) | {"recorded": False}
    except CannotRehearse as error:
        if key not in (known := _known()):
            raise CannotRehearse(f"{error}. Of {script} as it is now there is no record, either") from None
        return known[key] | {"recorded": True}
    if os.environ.get("REFIMPL_RECORD"):
        kept = {name: found[name] for name in found if name not in ("seconds", "recorded")}
        RECORDS.write_text(json.dumps(_known() | {key: kept}, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return found


def _known():
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
