"""The package's logger: silent below warnings unless `HOPPERFLASH_LOG` asks for more."""

from __future__ import annotations

import logging
from functools import lru_cache

from hopperflash import env


@lru_cache(maxsize=1)
def logger() -> logging.Logger:
    """`logging.getLogger("hopperflash")`, printing to stderr where `HOPPERFLASH_LOG` is set.

    Raises `InvalidArgument` where that is no level.
    """
    log = logging.getLogger("hopperflash")
    level = env.log_level()
    if level is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hopperflash: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
    return log
