"""The policies of pictures and clips as one. Pure."""

from dataclasses import dataclass

from encoder_service.clip_settings import ClipPolicy
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from shared.features.key import EffectiveSettings, Modality


@dataclass(frozen=True, slots=True)
class Policies:
    """What requests may wish for, and what they get where they wish for nothing."""

    picture: PixelPolicy
    clip: ClipPolicy

    def resolve(
        self, requested: RequestedSettings, modality: Modality, *, is_list: bool
    ) -> EffectiveSettings:
        """Raises InvalidMediaSettings, naming the field."""
        if modality is Modality.IMAGE:
            return self.picture.resolve(requested)
        return self.clip.resolve(requested, is_list=is_list)
