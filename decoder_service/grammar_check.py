"""An isolated process that tries forms of answers: it may crash or grow on them, and the decoder goes on.

See shared/isolation. A form that passes here is compiled by the decoder itself, which needs it at hand.
"""

import json
import threading

from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from decoder_service.grammar_compiler import CHECK_STACK_BYTES, GrammarCompiler, with_stack
from decoder_service.output_format import OutputFormat
from shared.errors import InvalidRequest
from shared.isolation.child import Handler, serve


def main() -> None:
    thread = threading.Thread(target=serve, args=(_open_checker,))
    with_stack(CHECK_STACK_BYTES, thread.start)
    thread.join()


def packed(form: OutputFormat) -> bytes:
    """The job that tries the form."""
    return json.dumps([form.kind, *form.values]).encode()


def _open_checker(setup: bytearray) -> Handler:
    compiler = GrammarCompiler.unpack(setup)

    def check(job: bytearray) -> bytes:
        kind, *values = json.loads(job)
        form = OutputFormat(kind, tuple(values))
        matcher = compiler.compile(form).deep_copy()
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, compiler.vocab_size), 0)
        if matcher.is_error():
            raise InvalidRequest("the form is too complex to begin it", field=form.field)
        return b""

    return check


if __name__ == "__main__":
    main()
