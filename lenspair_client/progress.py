"""How far a streamed answer has come: enough to show it, and to go on with it elsewhere; pure."""

from lenspair_client.messages import answer_of
from lenspair_client.values import Answer
from shared.pb.lenspair.decoder.v1 import decoder_pb2


class Progress:
    """Collects the messages of one answer over all the streams that it takes."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.summary: decoder_pb2.Summary | None = None
        self._texts: list[str] = []
        self._logprobs: list[decoder_pb2.TokenLogprobs] = []
        self._resumed = 0

    @property
    def can_resume(self) -> bool:
        """False when text came without its tokens: going on would repeat it."""
        return bool(self.token_ids) or not any(self._texts)

    def begin_stream(self) -> None:
        """Notes that a stream is opened for what is still missing."""
        self._resumed += bool(self.token_ids)

    def take(self, message: decoder_pb2.StreamGenerateResponse) -> str:
        """Notes a message; returns its text."""
        if message.HasField("summary"):
            self.summary = message.summary
            return ""
        self.token_ids += message.delta.token_ids
        self._logprobs += message.delta.logprobs
        self._texts.append(message.delta.text)
        return message.delta.text

    def answer(self) -> Answer:
        """The whole answer, once its summary is here."""
        assert self.summary is not None, "an answer is whole when its summary is here"
        return answer_of(
            self.summary, "".join(self._texts), self.token_ids, self._logprobs, resumed=self._resumed
        )
