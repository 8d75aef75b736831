"""What a person at a terminal is told about a failed command; pure."""

from lenspair_client.errors import (
    DeadlineExceeded,
    FeatureNotFound,
    LenspairClientError,
    LenspairRpcError,
    QueueFull,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    UnreadableImage,
)

FAILED = 1
UNUSABLE = 2
UNREACHABLE = 3
OUT_OF_TIME = 4

EXIT_CODES_HELP = (
    "exit status: 0 done; 1 the request was refused or failed; 2 the command or a file can't be used; "
    "3 no server was reached, or it can't serve now; 4 the time was used up; 130 interrupted"
)


def exit_code(error: LenspairClientError) -> int:
    """The exit status of a command that ended with this error."""
    match error:
        case UnreadableImage():
            return UNUSABLE
        case Unavailable():
            return UNREACHABLE
        case DeadlineExceeded():
            return OUT_OF_TIME
        case _:
            return FAILED


def explain(error: LenspairClientError, *, encoder: str, decoder: str) -> str:
    """What happened, and what to do next."""
    if not isinstance(error, LenspairRpcError):
        return str(error)
    advice = _advice(error, encoder, decoder)
    message = error.message if error.reason else f"{error.code.name}: {error.message}"
    return f"{message}\n{advice}" if advice else message


def _advice(error: LenspairRpcError, encoder: str, decoder: str) -> str:  # noqa: PLR0911  one for each kind
    match error:
        case Unavailable(reason=""):
            return (
                f"Is the pair running? `make up` starts one. The encoder should be at {encoder} and the "
                f"decoder at {decoder}; --encoder and --decoder, or LENSPAIR_ENCODER and LENSPAIR_DECODER, "
                "name others."
            )
        case Unavailable(reason="STORE_UNAVAILABLE"):
            return "The servers run, but their feature store does not answer: see LENSPAIR_STORE_URL there."
        case FeatureNotFound():
            return (
                "The decoder does not find what the encoder has stored. Both need the same "
                "LENSPAIR_STORE_URL, LENSPAIR_TENANT_STORE_URLS and LENSPAIR_STORE_KEY, and the store needs "
                "room."
            )
        case QueueFull():
            return f"The server is busy; try again in {error.retry_after or 1:.1f} seconds."
        case DeadlineExceeded():
            return "--timeout gives it more time."
        case Unimplemented(reason=""):
            return f"Is {encoder} an encoder, and {decoder} a decoder? --encoder and --decoder set them."
        case Unauthenticated():
            return f"--metadata {error.field.removeprefix('metadata.').lower()}=TENANT names the tenant."
        case LenspairRpcError(reason="FEATURE_REVISION_MISMATCH"):
            return "Encoder and decoder must be started with the same checkpoint."
        case _:
            return f"The field at fault is {error.field}." if error.field else ""
