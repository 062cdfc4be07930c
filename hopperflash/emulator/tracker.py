"""The happens-before detector of one cluster: clocks, access log and entities."""

from __future__ import annotations

from typing import Any

from .access_log import AccessLog
from .clocks import Clocks
from .hazards import HazardLog


class Tracker:
    """What the CTAs of a cluster share of the detector."""

    def __init__(self, hazards: HazardLog, warps_per_cta: int, ctas: int) -> None:
        self.hazards = hazards
        self.log = AccessLog()
        self.clocks = Clocks(warps_per_cta * ctas)
        # Keyed by id, so they must live as long as the keys.
        self.keep: list[Any] = []
        self._entities: dict[tuple[str, Any], int] = {}
        self._kinds: list[str] = ["warp"] * self.clocks.warps
        single = ctas == 1
        self._names = [
            f"warp {w % warps_per_cta}" + ("" if single else f" of CTA rank {w // warps_per_cta}")
            for w in range(self.clocks.warps)
        ]

    def entity(self, kind: str, key: Any) -> int:
        """The entity of an mbarrier, warpgroup ("wgmma") or warp ("bulk", "copy", "init")."""
        found = self._entities.get((kind, key))
        if found is None:
            found = self._entities[kind, key] = self.clocks.new_entity()
            self._kinds.append(kind)
        return found

    def entities(self, kind: str) -> list[int]:
        """All entities of a kind so far."""
        return [number for number, name in enumerate(self._kinds) if name == kind]

    def once(self, subject: Any) -> bool:
        """True the first time; for rules that one mistake breaks over and over."""
        key = ("once", id(subject))
        if key in self._entities:
            return False
        self._entities[key] = -1
        self.keep.append(subject)
        return True

    def kind(self, entity: int) -> str:
        return self._kinds[entity]

    def warp_name(self, row: int) -> str:
        return self._names[row]
