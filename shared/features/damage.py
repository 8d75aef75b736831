"""What is wrong with a stored record; knows neither stores nor metrics."""

from enum import StrEnum


class DamageCause(StrEnum):
    """Why a record was refused; few enough to be the label of a metric."""

    SIZE = "size"  # the manifest is longer than any that we write
    SEAL = "seal"  # damaged, or sealed with another key
    SYNTAX = "syntax"  # not a manifest message
    VERSION = "version"  # a layout that is unknown here
    KEY = "key"  # the record of another key
    FIELDS = "fields"  # fields that contradict one another or a limit
    LENGTH = "length"  # a chunk is too short or too long
    CHECKSUM = "checksum"  # a chunk holds other bytes
    NOT_FINITE = "not_finite"  # NaN or infinity among the values, or a scale beyond its limits
    WRONG_TYPE = "wrong_type"  # the name holds something else than bytes


class UnusableRecord(Exception):
    """A record that must not be used. Private to the stores: callers see a miss."""


class DamagedRecord(UnusableRecord):
    """Something about the record is wrong."""

    def __init__(self, cause: DamageCause) -> None:
        super().__init__(cause.value)
        self.cause = cause


class IncompleteRecord(UnusableRecord):
    """A part of the record is gone, as when a store evicts parts one by one."""
