"""Models come from installed packages and from configurations: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
