"""The patch grid of one picture or clip."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Patch grid of one input: temporal patches, rows and columns, before spatial merging."""

    t: int
    h: int
    w: int

    def token_count(self, merge_size: int) -> int:
        """Visual tokens after merging `merge_size` x `merge_size` patches into one."""
        return self.t * self.h * self.w // merge_size**2
