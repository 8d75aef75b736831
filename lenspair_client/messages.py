"""Requests built and responses read: values ↔ messages of the contracts; pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC

from lenspair_client.media import Media
from lenspair_client.values import (
    Answer,
    Candidate,
    Feature,
    FinishReason,
    Generation,
    MediaSettings,
    Outcome,
    Sample,
    TokenCount,
    TokenLogprobs,
    Turn,
    Usage,
)
from shared.pb.lenspair.decoder.v1 import decoder_pb2
from shared.pb.lenspair.encoder.v1 import encoder_pb2

CHUNK_BYTES = 1024 * 1024

_PRIORITIES = {
    None: decoder_pb2.PRIORITY_UNSPECIFIED,
    "low": decoder_pb2.PRIORITY_LOW,
    "normal": decoder_pb2.PRIORITY_NORMAL,
    "high": decoder_pb2.PRIORITY_HIGH,
}
_ROLES = {
    "system": decoder_pb2.ROLE_SYSTEM,
    "user": decoder_pb2.ROLE_USER,
    "assistant": decoder_pb2.ROLE_ASSISTANT,
}
_OUTCOMES = {
    encoder_pb2.OUTCOME_HIT: Outcome.HIT,
    encoder_pb2.OUTCOME_ENCODED: Outcome.ENCODED,
    encoder_pb2.OUTCOME_JOINED: Outcome.JOINED,
    encoder_pb2.OUTCOME_NEAR: Outcome.NEAR,
}


def encode_request(
    media: Media, settings: MediaSettings, *, allow_hand_over: bool
) -> encoder_pb2.EncodeRequest:
    """One picture or clip in one message."""
    if media.frames:
        frames = encoder_pb2.FrameList(frames=media.frames, timestamps=media.timestamps)
        sent = encoder_pb2.Media(modality=_modality(media), frames=frames)
    else:
        sent = encoder_pb2.Media(modality=_modality(media), data=media.data)
    return encoder_pb2.EncodeRequest(
        media=sent,
        settings=_settings(settings, media),
        allow_hand_over=allow_hand_over,
    )


def encode_chunks(
    media: Media, settings: MediaSettings, *, allow_hand_over: bool
) -> Iterator[encoder_pb2.StreamEncodeRequest]:
    """One picture or clip as a header and chunks."""
    yield encoder_pb2.StreamEncodeRequest(
        header=encoder_pb2.StreamEncodeHeader(
            modality=_modality(media),
            size_bytes=len(media.data),
            settings=_settings(settings, media),
            allow_hand_over=allow_hand_over,
        )
    )
    for start in range(0, len(media.data), CHUNK_BYTES):
        yield encoder_pb2.StreamEncodeRequest(chunk=media.data[start : start + CHUNK_BYTES])


def lookup_request(medias: Sequence[Media], settings: MediaSettings) -> encoder_pb2.LookupFeaturesRequest:
    """Asks for pictures and clips by their contents' digests."""
    return encoder_pb2.LookupFeaturesRequest(queries=[_query(media, settings) for media in medias])


def generation_task(
    turns: Sequence[Turn], generation: Generation, *, received: Sequence[int] = (), is_stream: bool
) -> decoder_pb2.GenerationTask:
    """One question. A stream always asks for token ids: going on at another decoder needs them."""
    return decoder_pb2.GenerationTask(
        turns=turn_messages(turns),
        sampling=decoder_pb2.SamplingParams(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p,
            repetition_penalty=generation.repetition_penalty,
            presence_penalty=generation.presence_penalty,
            frequency_penalty=generation.frequency_penalty,
            logit_bias=generation.logit_bias,
            seed=generation.seed,
        ),
        max_output_tokens=generation.max_output_tokens,
        min_output_tokens=generation.min_output_tokens,
        stop_sequences=generation.stop_sequences,
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
        return_token_ids=generation.return_token_ids or is_stream,
        top_logprobs=generation.top_logprobs,
        continuation_token_ids=[*generation.continuation_token_ids, *received],
        priority=_PRIORITIES[generation.priority],
        output_format=_output_format(generation),
        sample_count=generation.samples,
        first_sample=generation.first_sample,
    )


def turn_messages(turns: Sequence[Turn]) -> list[decoder_pb2.Turn]:
    """Turns as the decoder reads them."""
    return [
        decoder_pb2.Turn(role=_ROLES[turn.role], parts=[_part(part) for part in turn.parts]) for turn in turns
    ]


def feature_of(response: encoder_pb2.EncodeResponse | encoder_pb2.StreamEncodeResponse) -> Feature:
    """The feature in an encoder's answer."""
    # An outcome that a later server may send says at least that the feature is there.
    return feature_at(response.feature, _OUTCOMES.get(response.outcome, Outcome.ENCODED))


def feature_at(ref: encoder_pb2.FeatureRef, outcome: Outcome) -> Feature:
    """The feature that a reference names."""
    return Feature(
        key=ref.key,
        grid=(ref.grid_thw.t, ref.grid_thw.h, ref.grid_thw.w),
        token_count=ref.token_count,
        size_bytes=ref.size_bytes,
        expires_at=ref.expire_time.ToDatetime(tzinfo=UTC),
        outcome=outcome,
        source=ref.source,
    )


def features_found(response: encoder_pb2.LookupFeaturesResponse) -> list[Feature | None]:
    """One feature, or None, for each query."""
    return [
        feature_at(result.feature, Outcome.HIT) if result.HasField("feature") else None
        for result in response.results
    ]


def whole_answer_of(response: decoder_pb2.GenerateResponse) -> Answer:
    """A whole answer with all of its samples."""
    answer = answer_of(response.summary, response.text, response.token_ids, response.logprobs)
    summaries = {each.sample_index: each for each in response.summary.samples}
    further = [
        _sample(each, summaries.get(each.sample_index, decoder_pb2.SampleSummary()))
        for each in response.further_samples
    ]
    return replace(answer, further_samples=tuple(further))


def answer_of(
    summary: decoder_pb2.Summary,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[decoder_pb2.TokenLogprobs],
    *,
    resumed: int = 0,
) -> Answer:
    """A whole answer out of its pieces."""
    return Answer(
        text=text,
        finish_reason=_finish_reason(summary.finish_reason),
        usage=Usage(
            input_tokens=summary.input_tokens,
            visual_tokens=summary.visual_tokens,
            output_tokens=summary.output_tokens,
            reused_tokens=summary.reused_tokens,
        ),
        time_to_first_token=summary.time_to_first_token.ToTimedelta().total_seconds(),
        queue_seconds=summary.queue_time.ToTimedelta().total_seconds(),
        resumed=resumed,
        token_ids=tuple(token_ids),
        logprobs=tuple(_token_logprobs(place) for place in logprobs),
    )


def token_count_of(response: decoder_pb2.CountTokensResponse) -> TokenCount:
    """The length of a prompt."""
    return TokenCount(
        input_tokens=response.input_tokens,
        visual_tokens=response.visual_tokens,
        context_tokens=response.context_tokens,
    )


def _output_format(generation: Generation) -> decoder_pb2.OutputFormat | None:
    schema = generation.json_schema
    given = [schema is not None, generation.regex is not None, bool(generation.choices)]
    if sum(given) > 1:
        raise ValueError("an answer has one form: a JSON schema, a regular expression or choices")
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return decoder_pb2.OutputFormat(json_schema=text)
    if generation.regex is not None:
        return decoder_pb2.OutputFormat(regex=generation.regex)
    if generation.choices:
        return decoder_pb2.OutputFormat(choices=decoder_pb2.Choices(values=generation.choices))
    return None


def _sample(sample: decoder_pb2.Sample, summary: decoder_pb2.SampleSummary) -> Sample:
    return Sample(
        sample_index=sample.sample_index,
        text=sample.text,
        finish_reason=_finish_reason(summary.finish_reason),
        output_tokens=summary.output_tokens,
        token_ids=tuple(sample.token_ids),
        logprobs=tuple(_token_logprobs(place) for place in sample.logprobs),
    )


def _query(media: Media, settings: MediaSettings) -> encoder_pb2.FeatureQuery:
    own = _settings(settings, media)
    if media.frames:
        frames = encoder_pb2.FrameDigests(sha256=media.frame_sha256s, timestamps=media.timestamps)
        return encoder_pb2.FeatureQuery(modality=_modality(media), frames=frames, settings=own)
    return encoder_pb2.FeatureQuery(modality=_modality(media), sha256=media.sha256, settings=own)


def _modality(media: Media) -> encoder_pb2.Modality.ValueType:
    return encoder_pb2.MODALITY_VIDEO if media.is_clip else encoder_pb2.MODALITY_IMAGE


def _settings(settings: MediaSettings, media: Media) -> encoder_pb2.MediaSettings:
    """What is for clips alone goes to clips alone: one request may hold both."""
    own = encoder_pb2.MediaSettings(
        min_pixels=settings.min_pixels, max_pixels=settings.max_pixels, do_resize=settings.do_resize
    )
    if media.is_clip:
        clip = encoder_pb2.MediaSettings(
            total_pixels=settings.total_pixels, fps=settings.fps, num_frames=settings.num_frames
        )
        own.MergeFrom(clip)
    return own


def _part(part: str | Feature) -> decoder_pb2.Part:
    if isinstance(part, str):
        return decoder_pb2.Part(text=part)
    return decoder_pb2.Part(feature_key=part.key, feature_source=part.source)


def _finish_reason(reason: int) -> FinishReason:
    match reason:
        case decoder_pb2.FINISH_REASON_STOP:
            return "stop"
        case decoder_pb2.FINISH_REASON_LENGTH:
            return "length"
        case _:
            return "unknown"


def _token_logprobs(place: decoder_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(Candidate(candidate.token_id, candidate.logprob) for candidate in place.top)
    return TokenLogprobs(Candidate(place.token_id, place.logprob), top)
