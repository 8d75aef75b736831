"""Values to messages of the contracts, and back."""

from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from lenspair_client import messages
from lenspair_client.media import Media, load
from lenspair_client.values import Candidate, Generation, MediaSettings, Outcome, TokenLogprobs, Turn, Usage
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as decoder
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as encoder

REF = encoder.FeatureRef(
    key="key",
    grid_thw=encoder.GridThw(t=1, h=4, w=6),
    token_count=6,
    size_bytes=1234,
    expire_time=Timestamp(seconds=1_700_000_000),
)


def test_what_is_unset_stays_unset_and_zero_stays_zero() -> None:
    task = messages.generation_task((), Generation(temperature=0.0, top_logprobs=0), is_stream=False)
    assert task.sampling.HasField("temperature")
    assert task.HasField("top_logprobs")
    assert not task.sampling.HasField("top_k")
    assert not task.HasField("max_output_tokens")
    assert not task.return_token_ids
    assert messages.generation_task((), Generation(), is_stream=True).return_token_ids


def test_every_rule_of_sampling_arrives() -> None:
    rules = Generation(
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.0,
        logit_bias={7: -1.5},
        stop_token_ids=(3, 4),
        priority="low",
        samples=3,
        first_sample=2,
    )
    task = messages.generation_task((), rules, is_stream=False)
    assert (task.sampling.top_p, task.sampling.min_p, task.sampling.repetition_penalty) == (0.5, 0.1, 1.2)
    assert task.sampling.HasField("presence_penalty")
    assert not task.sampling.HasField("frequency_penalty")
    assert dict(task.sampling.logit_bias) == {7: -1.5}
    assert list(task.stop_token_ids) == [3, 4]
    assert (task.priority, task.sample_count, task.first_sample) == (decoder.PRIORITY_LOW, 3, 2)


def test_an_answer_has_one_form_at_the_most() -> None:
    def form(**rules: Any) -> decoder.OutputFormat:
        return messages.generation_task((), Generation(**rules), is_stream=False).output_format

    assert form(regex="a+") == decoder.OutputFormat(regex="a+")
    assert form(json_schema={"type": "null"}) == decoder.OutputFormat(json_schema='{"type": "null"}')
    assert form(choices=("a", "b")).choices.values == ["a", "b"]
    assert not messages.generation_task((), Generation(), is_stream=False).HasField("output_format")
    with pytest.raises(ValueError, match="one form"):
        form(regex="a", choices=("b",))


def test_a_whole_answer_has_all_samples_with_their_ends() -> None:
    ends = [(4, decoder.FINISH_REASON_STOP, 2), (5, decoder.FINISH_REASON_LENGTH, 9)]
    response = decoder.GenerateResponse(
        text="one",
        summary=decoder.Summary(
            finish_reason=decoder.FINISH_REASON_STOP,
            samples=[
                decoder.SampleSummary(sample_index=index, finish_reason=reason, output_tokens=count)
                for index, reason, count in ends
            ],
        ),
        further_samples=[decoder.Sample(sample_index=5, text="two", token_ids=[8])],
    )
    answer = messages.whole_answer_of(response)
    assert answer.text == "one"
    (second,) = answer.further_samples
    assert (second.sample_index, second.text, second.finish_reason) == (5, "two", "length")
    assert (second.output_tokens, second.token_ids) == (9, (8,))


def test_turns_keep_the_order_of_texts_and_features() -> None:
    feature = messages.feature_of(encoder.EncodeResponse(feature=REF))
    (turn,) = messages.turn_messages([Turn("user", ("left", feature, "right"))])
    assert [part.WhichOneof("content") for part in turn.parts] == ["text", "feature_key", "text"]
    assert turn.role == decoder.ROLE_USER


def test_chunks_are_a_header_and_all_the_bytes() -> None:
    data = bytes(range(256)) * 8200
    header, *chunks = messages.encode_chunks(load(data), MediaSettings(max_pixels=99), allow_hand_over=True)
    assert header.header.size_bytes == len(data)
    assert header.header.settings.max_pixels == 99
    assert b"".join(chunk.chunk for chunk in chunks) == data
    assert {len(chunk.chunk) for chunk in chunks[:-1]} == {messages.CHUNK_BYTES}


def test_lookups_name_pictures_by_digest() -> None:
    media = load(b"picture")
    (query,) = messages.lookup_request([media], MediaSettings()).queries
    assert (query.sha256, query.modality) == (media.sha256, encoder.MODALITY_IMAGE)
    assert media == Media(b"", media.sha256)


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (encoder.OUTCOME_HIT, Outcome.HIT),
        (encoder.OUTCOME_ENCODED, Outcome.ENCODED),
        (encoder.OUTCOME_JOINED, Outcome.JOINED),
        (encoder.OUTCOME_NEAR, Outcome.NEAR),
    ],
)
def test_a_feature_says_how_it_was_found(sent: encoder.Outcome.ValueType, outcome: Outcome) -> None:
    feature = messages.feature_of(encoder.EncodeResponse(feature=REF, outcome=sent))
    assert (feature.key, feature.grid, feature.token_count, feature.size_bytes) == ("key", (1, 4, 6), 6, 1234)
    assert feature.expires_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert feature.outcome is outcome


def test_lookups_answer_in_order() -> None:
    results = [encoder.LookupResult(), encoder.LookupResult(feature=REF)]
    missing, found = messages.features_found(encoder.LookupFeaturesResponse(results=results))
    assert missing is None
    assert found is not None
    assert found.outcome is Outcome.HIT


def test_an_answer_has_all_that_was_sent() -> None:
    summary = decoder.Summary(
        finish_reason=decoder.FINISH_REASON_LENGTH,
        input_tokens=1,
        visual_tokens=2,
        output_tokens=3,
        reused_tokens=4,
        time_to_first_token=Duration(nanos=250_000_000),
        queue_time=Duration(nanos=125_000_000),
    )
    place = decoder.TokenLogprobs(
        token_id=5, logprob=-0.5, top=[decoder.TopLogprob(token_id=6, logprob=-0.25)]
    )
    answer = messages.answer_of(summary, "text", [5], [place])
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("text", "length", (5,))
    assert answer.usage == Usage(1, 2, 3, 4)
    assert (answer.time_to_first_token, answer.queue_seconds) == (0.25, 0.125)
    assert answer.logprobs == (TokenLogprobs(Candidate(5, -0.5), (Candidate(6, -0.25),)),)


def test_a_finish_reason_of_a_later_server_is_no_error() -> None:
    assert messages.answer_of(decoder.Summary(), "", [], []).finish_reason == "unknown"


@pytest.mark.parametrize("allow", [True, False])
def test_a_hand_over_is_asked_for_in_both_forms(allow: bool) -> None:
    media = load(b"picture")
    assert messages.encode_request(media, MediaSettings(), allow_hand_over=allow).allow_hand_over is allow
    header, *_ = messages.encode_chunks(media, MediaSettings(), allow_hand_over=allow)
    assert header.header.allow_hand_over is allow


def test_a_source_goes_where_its_feature_goes() -> None:
    ref = encoder.FeatureRef(key="key", source="10.0.0.7:50051/tag")
    offered = messages.feature_of(encoder.EncodeResponse(feature=ref))
    stored = messages.feature_of(encoder.EncodeResponse(feature=REF))
    (turn,) = messages.turn_messages([Turn("user", ("text", offered, stored))])
    assert offered.source == ref.source
    assert [part.feature_source for part in turn.parts] == ["", ref.source, ""]
