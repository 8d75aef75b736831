"""The `lenspair` command: ask a running pair from a terminal."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lenspair_client import store_commands, terminal
from lenspair_client.advice import EXIT_CODES_HELP, UNUSABLE, exit_code, explain
from lenspair_client.client import LenspairClient
from lenspair_client.errors import LenspairClientError
from lenspair_client.options import ClientOptions
from lenspair_client.values import Answer, Clip, Generation, Turn

Command = Callable[[argparse.Namespace, LenspairClient], int]

_DEFAULT_ENCODER = "localhost:50051"
_DEFAULT_DECODER = "localhost:50052"
# A person would rather know soon. Programs use the library, which tries as long as a request has time.
_PATIENCE_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        client_options = ClientOptions(patience_seconds=options.patience, metadata=tuple(options.metadata))
        with LenspairClient(options.encoder, options.decoder, client_options) as client:
            return command(options, client)
    except LenspairClientError as error:
        terminal.complain(explain(error, encoder=options.encoder, decoder=options.decoder))
        return exit_code(error)
    except ValueError as error:  # what no call or message can hold
        terminal.complain(str(error))
        return UNUSABLE
    except KeyboardInterrupt:
        terminal.complain("interrupted")
        return 130
    except BrokenPipeError:
        terminal.abandon_output()
        return 141


def _ask(options: argparse.Namespace, client: LenspairClient) -> int:
    if options.samples > 1:
        return _ask_for_samples(options, client)
    steps = client.ask_stream(
        options.question,
        options.image,
        system=options.system,
        generation=_generation(options),
        timeout=options.timeout,
    )
    for step in steps:
        if isinstance(step, str):
            if not options.json:
                terminal.show_piece(step)
        elif options.json:
            terminal.show_json(_as_json(step, options.image))
        else:
            terminal.end_pieces()
            terminal.note(_summary(step), always=options.verbose)
    return 0


def _ask_for_samples(options: argparse.Namespace, client: LenspairClient) -> int:
    answer = client.ask(
        options.question,
        options.image,
        system=options.system,
        generation=_generation(options),
        timeout=options.timeout,
    )
    texts = [answer.text, *(sample.text for sample in answer.further_samples)]
    if options.json:
        terminal.show_json(_as_json(answer, options.image) | {"samples": texts})
        return 0
    for number, text in enumerate(texts, start=1):
        terminal.show_piece(f"{number}. {text}")
        terminal.end_pieces()
    terminal.note(_summary(answer), always=options.verbose)
    return 0


def _generation(options: argparse.Namespace) -> Generation:
    return Generation(
        max_output_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop_sequences=tuple(options.stop),
        priority=options.priority,
        json_schema=options.json_schema,
        regex=options.regex,
        choices=tuple(options.choice),
        samples=options.samples,
    )


def _encode(options: argparse.Namespace, client: LenspairClient) -> int:
    for file in options.file:
        feature = client.encode(_medium(file, options), timeout=options.timeout)
        terminal.show_feature(file, feature, as_json=options.json)
    return 0


def _lookup(options: argparse.Namespace, client: LenspairClient) -> int:
    is_any_missing = False
    for file in options.file:
        feature = client.lookup(_medium(file, options), timeout=options.timeout)
        is_any_missing |= feature is None
        terminal.show_feature(file, feature, as_json=options.json)
    return 1 if is_any_missing else 0


def _count(options: argparse.Namespace, client: LenspairClient) -> int:
    features = client.ensure(options.image, timeout=options.timeout)
    count = client.count_tokens([Turn("user", (*features, options.question))], timeout=options.timeout)
    if options.json:
        terminal.show_json(
            {
                "input_tokens": count.input_tokens,
                "visual_tokens": count.visual_tokens,
                "context_tokens": count.context_tokens,
            }
        )
    else:
        terminal.show_line(
            f"{count.input_tokens} tokens, {count.visual_tokens} of them visual; "
            f"the model's context holds {count.context_tokens}"
        )
    return 0


def _summary(answer: Answer) -> str:
    outcomes = [f"pictures: {', '.join(answer.outcomes)}"] if answer.features else []
    usage = answer.usage
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    times = f"first token {answer.time_to_first_token:.2f} s, all {answer.total_seconds:.2f} s"
    repeated = [f"tried again {answer.repeated} times"] if answer.repeated else []
    resumed = [f"went on elsewhere {answer.resumed} times"] if answer.resumed else []
    return " · ".join([*outcomes, tokens, times, f"ended by {answer.finish_reason}", *repeated, *resumed])


def _medium(file: Path, options: argparse.Namespace) -> Path | Clip:
    return Clip(file=file) if options.clip else file


def _file_of(medium: Path | Clip) -> object:
    return medium.file if isinstance(medium, Clip) else medium


def _as_json(answer: Answer, images: Sequence[Path | Clip]) -> dict[str, object]:
    usage = answer.usage
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "images": [
            {"file": str(_file_of(image)), "outcome": feature.outcome, "tokens": feature.token_count}
            for image, feature in zip(images, answer.features, strict=True)
        ],
        "input_tokens": usage.input_tokens,
        "visual_tokens": usage.visual_tokens,
        "output_tokens": usage.output_tokens,
        "reused_tokens": usage.reused_tokens,
        "time_to_first_token_seconds": answer.time_to_first_token,
        "encode_seconds": round(answer.encode_seconds, 4),
        "total_seconds": round(answer.total_seconds, 4),
        "repeated": answer.repeated,
        "resumed": answer.resumed,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lenspair", description="Ask a Lenspair pair about pictures.", epilog=EXIT_CODES_HELP
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ask = _add(commands, "ask", "answer a question, about pictures or without any", _ask)
    _add_question(ask)
    ask.add_argument("--system", default="", help="instructions for the model")
    _add_generation(ask)
    ask.add_argument("--verbose", action="store_true", help="print the summary even to a file")

    encode = _add(commands, "encode", "have pictures' features in the store", _encode)
    _add_files(encode)

    lookup = _add(commands, "lookup", "tell whether the store has pictures' features (1: not all)", _lookup)
    _add_files(lookup)

    count = _add(commands, "count", "count the tokens of a question; missing pictures are encoded", _count)
    _add_question(count)

    store_commands.add(commands, _add)
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, command: Command
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", epilog=EXIT_CODES_HELP)
    parser.set_defaults(command=command)
    environment = os.environ  # the command's composition root: nothing below reads it
    parser.add_argument(
        "--encoder",
        metavar="ADDRESS",
        default=environment.get("LENSPAIR_ENCODER", _DEFAULT_ENCODER),
        help="host:port of the encoder; or LENSPAIR_ENCODER (now %(default)s)",
    )
    parser.add_argument(
        "--decoder",
        metavar="ADDRESS",
        default=environment.get("LENSPAIR_DECODER", _DEFAULT_DECODER),
        help="host:port of the decoder; or LENSPAIR_DECODER (now %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time for a request, all its calls together; 60 by default",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        default=_PATIENCE_SECONDS,
        help="how long to try again while a server or the store is gone or full; %(default)s by default",
    )
    parser.add_argument(
        "--metadata",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="goes with every call, to name a tenant for instance; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return name, value


def _add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the answer is generated")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    group.add_argument("--samples", type=int, default=1, metavar="N", help="answers to give; 1 by default")
    group.add_argument("--priority", choices=("low", "normal", "high"), help="who is served first")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="the fewest tokens of this probability together"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="only the K best tokens")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="only tokens with this share of the best one's"
    )
    form = parser.add_argument_group("which form the answer must have").add_mutually_exclusive_group()
    form.add_argument("--choice", action="append", default=[], metavar="TEXT", help="one of these texts")
    form.add_argument("--regex", metavar="PATTERN", help="what this expression matches as a whole")
    form.add_argument("--json-schema", type=_file, metavar="FILE", help="JSON of the schema in this file")
    for name, what in (
        ("repetition", "tokens that the prompt or the answer holds; above 1 makes them rarer"),
        ("presence", "tokens that the answer holds; from -2 to 2"),
        ("frequency", "tokens each time that the answer holds them; from -2 to 2"),
    ):
        group.add_argument(f"--{name}-penalty", type=float, metavar="X", help=f"for {what}")


def _file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} can't be read: {error}") from error


def _clip(path: str) -> Clip:
    return Clip(file=Path(path))


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="+", help="a picture")
    parser.add_argument("--clip", action="store_true", help="the files are clips (MP4, WebM, AVI, GIF)")


def _add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="what to ask")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a picture, before the question; may be given several times",
    )
    parser.add_argument(
        "--clip",
        type=_clip,
        action="append",
        dest="image",
        metavar="FILE",
        help="a clip (MP4, WebM, AVI, GIF), likewise; the order of pictures and clips is kept",
    )
