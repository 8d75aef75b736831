"""The form that an answer must have: what callers may ask for, and its grammar; knows no tokens.

Checks here are of sizes and of what a grammar can be made from; whether it makes sense is the compiler's.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llguidance import LLMatcher

from decoder_service.turns import is_unicode
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only in the stubs

MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_REGEX_CHARACTERS = 4096
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1024

Kind = Literal["json_schema", "regex", "choices"]

# Compact JSON as Python writes it: a model that may put white space anywhere may never stop doing so. And
# what can't be enforced is refused, whatever the schema itself says about it.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A JSON schema, a regular expression (one value), or the texts that an answer may be."""

    kind: Kind
    values: tuple[str, ...]

    @property
    def field(self) -> str:
        return f"task.output_format.{self.kind}"

    def grammar(self) -> str:
        """For llguidance.

        Raises:
            InvalidRequest: too long, or not what its kind says.
        """
        match self.kind:
            case "json_schema":
                return self._json_grammar()
            case "regex":
                self._check_length(MAX_REGEX_CHARACTERS)
                return str(LLMatcher.grammar_from_regex(self.values[0]))
            case "choices":
                return self._choices_grammar()

    def _json_grammar(self) -> str:
        self._check_length(MAX_SCHEMA_CHARACTERS)
        if not self.values[0].lstrip().startswith("{"):
            raise InvalidRequest("the schema must be a JSON object", field=self.field)
        try:
            return str(LLMatcher.grammar_from_json_schema(self.values[0], overrides=_JSON_OPTIONS))
        except ValueError:
            raise InvalidRequest("the schema is no JSON, or nested too deeply", field=self.field) from None

    def _choices_grammar(self) -> str:
        if not 1 <= len(self.values) <= MAX_CHOICES:
            raise InvalidRequest(f"from 1 to {MAX_CHOICES} choices are allowed", field=self.field)
        if len(set(self.values)) < len(self.values):
            raise InvalidRequest("the choices must be different", field=self.field)
        self._check_length(MAX_CHOICE_CHARACTERS)
        return f"start: {' | '.join(map(json.dumps, self.values))}"

    def _check_length(self, most: int) -> None:
        if not all(1 <= len(value) <= most for value in self.values):
            raise InvalidRequest(f"a text of 1 to {most} characters is required", field=self.field)
        if not all(map(is_unicode, self.values)):
            raise InvalidRequest("the text holds half of a surrogate pair", field=self.field)
