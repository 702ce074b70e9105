"""Options by name, as a user sets them."""

from __future__ import annotations

from collections.abc import Mapping

Settings = Mapping[str, object]
