"""What a request must be so that no step can fail on it; checked before it meets its neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoder_service.engine.engine import GenerationRequest, Prompt
from shared.errors import FeatureRevisionMismatch, InvalidRequest, PromptTooLong
from shared.features.bundle import FeatureBundle

_FEATURES = "task.turns.parts.feature_key"
_CONTINUATION = "task.continuation_token_ids"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that a request must fit."""

    vocab_size: int
    hidden_size: int
    deepstack_levels: int


def check_length(request: GenerationRequest, context_tokens: int) -> None:
    """Raises PromptTooLong, with counts, when prompt and output can't fit the context."""
    prompt, output = request.prompt, request.limits.max_output_tokens
    tokens = len(prompt.token_ids)
    if tokens + output > context_tokens:
        visual = prompt.visual_tokens
        raise PromptTooLong(
            f"{tokens - visual} text tokens, {visual} visual tokens and {output} output tokens exceed "
            f"the context of {context_tokens}",
            field="task.turns",
            text_tokens=str(tokens - visual),
            visual_tokens=str(visual),
            output_tokens=str(output),
            context_tokens=str(context_tokens),
        )


def check_feature_ids(request: GenerationRequest) -> None:
    """Raises InvalidRequest when it is not said of each feature of the prompt what it is."""
    places, items = len(request.prompt.visual_spans), len(request.feature_ids)
    if places != items:
        raise InvalidRequest(f"{places} placeholders, {items} items", field="task.turns")


def check_request(request: GenerationRequest, shape: ModelShape) -> None:
    """Raises InvalidRequest for what the model can't compute, whatever the features are."""
    if not request.prompt.token_ids:
        raise InvalidRequest("the prompt is empty", field="task.turns")
    _check_token_ids(request.prompt.token_ids, shape.vocab_size, "task.turns")
    _check_token_ids(request.continuation, shape.vocab_size, _CONTINUATION)


def check_features(prompt: Prompt, first: int, bundles: Sequence[FeatureBundle], shape: ModelShape) -> None:
    """Raises InvalidRequest or FeatureRevisionMismatch for features that the model can't compute with.

    `bundles` are the features from number `first` of the prompt on. Reads every value once; keep it off the
    event loop.
    """
    _check_spans(prompt.visual_spans[first:], bundles)
    for bundle in bundles:
        _check_bundle(bundle, shape)


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int, field: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequest(f"token ids are from 0 to {vocab_size - 1}", field=field)


def _check_spans(
    visual_spans: Sequence[tuple[tuple[int, int], ...]], features: Sequence[FeatureBundle]
) -> None:
    if len(visual_spans) != len(features):
        raise InvalidRequest(f"{len(visual_spans)} placeholders, {len(features)} items", field="task.turns")
    for spans, bundle in zip(visual_spans, features, strict=True):
        places = sum(count for _, count in spans)
        if places != bundle.token_count:
            raise InvalidRequest(
                f"a feature has {bundle.token_count} tokens, and the prompt {places} places for it",
                field=_FEATURES,
            )


def _check_bundle(bundle: FeatureBundle, shape: ModelShape) -> None:
    if (bundle.hidden_size, bundle.deepstack_levels) != (shape.hidden_size, shape.deepstack_levels):
        raise FeatureRevisionMismatch(
            f"a feature has {bundle.deepstack_levels} levels of {bundle.hidden_size}, the model takes "
            f"{shape.deepstack_levels} of {shape.hidden_size}",
            field=_FEATURES,
        )
    if not bundle.tensor.is_floating_point():
        raise InvalidRequest("a feature's values are not floating-point numbers", field=_FEATURES)
    if not bundle.is_finite():
        raise InvalidRequest("a feature holds values that are not finite", field=_FEATURES)
